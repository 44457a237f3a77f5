"""What a forward and a backward pass of a decoder hold, roughly: arithmetic on its shape.

Counted are the tensors that autograd keeps of a Llama of transformers, with attention that does not keep its scores,
and the logits. Compared with what a CPU's allocator sees in tests/tools/test_footprint.py. Imports neither torch nor
DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Decoder", "activations"]


@dataclass(frozen=True)
class Decoder:
    """The shape of a decoder.

    Parameters
    ----------
    hidden, intermediate, layers, vocabulary
        As in its ``config.json``.
    keys
        Of the width of attention's keys and values, what share of ``hidden``.
    """

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    keys: float = 1.0

    @classmethod
    def of(cls, config: Any) -> Decoder | None:
        """The shape that a configuration of transformers tells; None where it is no such model."""
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        found: list[Any] = [getattr(config, name, None) for name in names]
        if not all(isinstance(each, int) and each > 0 for each in found):
            return None
        heads = getattr(config, "num_attention_heads", None) or 1
        keys = getattr(config, "num_key_value_heads", None) or heads
        hidden, intermediate, layers, vocabulary = map(int, found)
        return cls(hidden, intermediate, layers, vocabulary, keys / heads)


def activations(decoder: Decoder, tokens: int, width: int, *, checkpointing: bool) -> dict[str, int]:
    """Bytes by kind, at the moment when most of them are there.

    Parameters
    ----------
    tokens
        Of a micro-batch on a rank.
    width
        Bytes of an element of activations.
    checkpointing
        Whether layers keep their inputs alone, and one at a time is computed anew.

    Returns
    -------
    dict
        What layers keep; and the larger of what is not there together, a layer that is computed anew, or the logits
        (in fp32, as log-probabilities, their gradient, and in the weights' precision if that is another).
    """
    layer = tokens * _layer(decoder, width)
    logits = tokens * decoder.vocabulary * (12 + (width if width < 4 else 0))
    if not checkpointing:
        return {"kept_by_layers": decoder.layers * layer, "logits": logits}
    anew = layer + tokens * width * (decoder.hidden + 2 * decoder.intermediate)  # and gradients within it
    found = {"kept_by_layers": decoder.layers * tokens * decoder.hidden * width}
    return found | ({"logits": logits} if logits > anew else {"a_layer_computed_anew": anew})


def _layer(decoder: Decoder, width: int) -> int:
    """Bytes that a layer keeps of a token.

    Of each of its two norms the input in fp32, the normed one, and that times the weight; for attention queries, keys,
    values, and what it gives; for the MLP gate, its activation, up, and their product.
    """
    norms = 2 * decoder.hidden * (4 + 2 * width)
    attention = decoder.hidden * width * (2 + 2 * decoder.keys)
    return round(norms + attention + 4 * width * decoder.intermediate)
