"""The formats in which an optimizer keeps numbers, and the bytes that rows of a matrix or a stretch of a vector take.

Plain arithmetic: imports nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BF16", "BLOCK", "FORMATS", "FP32", "RowFormat"]

#: Quantised numbers have a float32 scale, their largest magnitude, for each block of so many (as in bitsandbytes).
BLOCK = 256
SCALE_BYTES = 4


@dataclass(frozen=True)
class RowFormat:
    """How numbers are kept.

    Parameters
    ----------
    name
        As users write it.
    bits
        Of a number.
    scaled
        Whether each block of :data:`BLOCK` numbers has a scale.
    """

    name: str
    bits: int
    scaled: bool = False

    def rows(self, count: int, width: int) -> int:
        """Bytes of ``count`` rows of ``width`` numbers.

        Blocks and bytes never span two rows, so that a row that two ranks share is the same on both.
        """
        return count * (-(-width * self.bits // 8) + (-(-width // BLOCK) * SCALE_BYTES if self.scaled else 0))

    def stretch(self, start: int, stop: int) -> int:
        """Bytes of the elements ``start`` to ``stop`` of a vector, with the scale of each block that they touch."""
        if start >= stop:
            return 0
        blocks = (stop - 1) // BLOCK - start // BLOCK + 1 if self.scaled else 0
        return -(-(stop - start) * self.bits // 8) + blocks * SCALE_BYTES


FP32 = RowFormat("fp32", 32)
BF16 = RowFormat("bf16", 16)
#: By the names that users write; ``8bit`` is what Hugging Face and bitsandbytes call moments of a byte.
FORMATS = {
    each.name: each
    for each in (
        FP32,
        BF16,
        RowFormat("fp16", 16),
        RowFormat("8bit", 8, scaled=True),
        RowFormat("int8", 8, scaled=True),
        RowFormat("int4", 4, scaled=True),
    )
}
