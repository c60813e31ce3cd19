"""The closed list of batch operations that travel in the header of a step.

Every stage holds its caches in a table, handle to batch. The engine alone names
handles; stages obey. An operation is applied by every stage at the same point of the
stream of steps, so all stages agree on which row is which without asking each other.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Sampling:
    """How one sequence draws its tokens; carried by :class:`New`, used by the last stage.

    ``temperature`` 0 is greedy. ``top_p`` 1 (or 0), ``top_k`` 0 and ``min_p`` 0 are off.
    The random key of a draw is a function of (``seed``, ``choice``, position): no state.

    ``repetition_penalty`` (1 is off) divides a positive logit, or multiplies a negative one,
    of every token of the prompt and the text so far (Keskar et al. 2019). From the logit of
    a token that was drawn n times, ``frequency_penalty`` takes n times itself and
    ``presence_penalty`` takes itself once. ``bias_tokens`` get ``bias_values`` added.

    ``logprobs`` asks for the log-probability of each drawn token and of that many of the most
    likely ones; None asks for none. They are the model's own, before all of the above.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_tokens: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    logprobs: int | None = None

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


@attrs.frozen
class New:
    """A batch of one row for ``request``, under ``handle``.

    It is empty, or begins as a copy of the one-row batch ``source``. ``prompt`` are its token
    ids, only where the sampling looks back. ``grammar`` is what its text must match, in
    llguidance's own notation, and ``ends`` are the tokens that end it, only where there is a
    grammar; the last stage alone reads them.
    """

    handle: int
    request: int
    sampling: Sampling
    prompt: tuple[int, ...] = ()
    source: int | None = None
    grammar: str | None = None
    ends: tuple[int, ...] = ()


@attrs.frozen
class Merge:
    """One batch under ``handle`` out of ``sources``, rows in that order; the sources go."""

    handle: int
    sources: tuple[int, ...]


@attrs.frozen
class Extend:
    """The rows of ``source`` appended to ``handle``; the source goes."""

    handle: int
    source: int


@attrs.frozen
class Filter:
    """Only ``rows`` of ``handle`` stay, in that order."""

    handle: int
    rows: tuple[int, ...]


@attrs.frozen
class Extract:
    """A copy of row ``row`` of ``source`` as a batch of one under ``handle``."""

    handle: int
    source: int
    row: int


@attrs.frozen
class Copy:
    """A copy of the whole batch ``source`` under ``handle``."""

    handle: int
    source: int


@attrs.frozen
class Trim:
    """The last ``tokens`` positions of ``handle`` are forgotten."""

    handle: int
    tokens: int


@attrs.frozen
class Prepare:
    """The coming steps of ``handle`` are right-padded: row i has ``lengths[i]`` real tokens."""

    handle: int
    lengths: tuple[int, ...]
    right_padding: tuple[int, ...]


@attrs.frozen
class Finalize:
    """The padding announced by :class:`Prepare` is over: caches move it to the left."""

    handle: int


@attrs.frozen
class Release:
    """``handle`` is forgotten; unknown handles are ignored, so a release can be repeated."""

    handle: int


Operation = New | Merge | Extend | Filter | Extract | Copy | Trim | Prepare | Finalize | Release
