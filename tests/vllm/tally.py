"""What the tests that start vLLM's engine have shown, summed up for the last lines of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from tests.vllm.rig import RELOADED, Answer, distance

NOISE = 1e-4
"""Log-probabilities in fp32 differ by a few 1e-6 when another batch, or another cut of the prompt, is computed."""


@attrs.define(eq=False)
class Tally:
    """Counts over a whole run."""

    equal: int = 0
    """Answers that were the same bit for bit as without a connector."""

    close: int = 0
    """Answers of other batches: the same tokens, log-probabilities within `NOISE`."""

    def same(self, mine: Sequence[Answer], yours: Sequence[Answer]) -> None:
        """Require equal answers from equal batches, and count them."""
        assert distance(mine, yours) == 0.0
        self.equal += len(mine)

    def near(self, mine: Sequence[Answer], yours: Sequence[Answer]) -> None:
        """Require the same tokens, and log-probabilities that differ by rounding only."""
        assert distance(mine, yours) < NOISE
        self.close += len(mine)

    def lines(self) -> Iterator[str]:
        """Yield lines for people."""
        if self.equal or self.close:
            yield f"tokens reloaded layer by layer: {RELOADED['tokens']:,}"
            yield (
                f"answers identical to a run without a connector: {self.equal} bit for bit, "
                f"{self.close} from other batches within {NOISE:g}"
            )


TALLY = Tally()
