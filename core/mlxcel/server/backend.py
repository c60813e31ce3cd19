"""What the server needs of the thing that runs requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mlxcel.engine.engine import Deliver
from mlxcel.engine.kv_manager import AdmissionDiagnostic, StageKVManager
from mlxcel.engine.service import Phase, StageState
from mlxcel.engine.slot import Request
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.errors import MlxcelError
from mlxcel.observe.live import LiveFigures


class Backend(Protocol):
    """A model being served, such as :class:`mlxcel.engine.service.Service`.

    See there for what each of these means.
    """

    phase: Phase
    error: MlxcelError | None
    stages: list[StageState]
    live: LiveFigures

    @property
    def managers(self) -> Sequence[StageKVManager]: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def context_size(self) -> int | None: ...
    @property
    def waiting(self) -> int: ...
    @property
    def active(self) -> int: ...
    def start(self) -> None: ...
    def submit_all(self, requests: Sequence[Request]) -> None: ...
    def cancel(self, index: int) -> None: ...
    def stop(self, *, drain: float = 0.0) -> None: ...


class MakeBackend(Protocol):
    """Makes the backend of one app; it must not start it."""

    def __call__(
        self,
        *,
        deliver: Deliver,
        on_refusal: Callable[[AdmissionDiagnostic], None],
        on_end: Callable[[], None],
    ) -> Backend: ...
