"""What the operator decides about the HTTP server."""

from __future__ import annotations

import attrs


@attrs.frozen
class Options:
    """Settings of one app.

    Attributes:
        model_id: The name under which the model is listed.
        other_names: Further names that a request may call it by.
        context_size: Tokens of a prompt and its answer together; None is the model's own.
        api_keys: A request must bring one of them; none are needed where there are none.
        allowed_origins: Whose web pages a browser may let use the server, such as
            ``https://chat.example``; ``*`` is everybody's.
        metrics: Whether ``/metrics`` is served.
        max_body_size: Bytes of a request's body.
        drain_timeout: Seconds that running requests get to finish at the end.
        keep_alive: Seconds of silence after which a stream sends a comment.
        patience: Seconds that a client may take to read what was written to it.
        backlog: Outputs that may wait for a client to read before the request is cancelled.
    """

    model_id: str
    other_names: tuple[str, ...] = ()
    context_size: int | None = None
    api_keys: tuple[str, ...] = attrs.field(default=(), repr=False)
    allowed_origins: tuple[str, ...] = ()
    metrics: bool = False
    max_body_size: int = 16 << 20
    drain_timeout: float = 30.0
    keep_alive: float = 15.0
    patience: float = 60.0
    backlog: int = 1024

    def knows(self, name: str) -> bool:
        """Whether ``name`` means the model that is served."""
        return name == self.model_id or name in self.other_names
