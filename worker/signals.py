"""What asks a worker to stop: SIGTERM, SIGINT, or the end of the process that started it."""

from __future__ import annotations

import os
import signal


class StopSignal:
    """Counts the signals; the first asks for a drain, the second to skip the wait.

    With ``parent`` set, the end of that parent process (a pid) counts as the first: a worker whose supervisor was
    killed must not go on alone.
    """

    def __init__(self, parent: int | None = None) -> None:
        self._parent = parent
        self._count = 0

    def install(self) -> None:
        """Take over SIGTERM and SIGINT; to be called before slow imports, so that no signal is missed."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    @property
    def requested(self) -> bool:
        """Whether to claim nothing more and finish."""
        return self._count > 0 or (self._parent is not None and os.getppid() != self._parent)

    @property
    def urgent(self) -> bool:
        """Whether to leave at once what still runs to others."""
        return self._count > 1

    def _handle(self, *_: object) -> None:
        self._count += 1
