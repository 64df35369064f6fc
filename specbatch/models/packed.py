"""A decoder in packed weights on a CPU: what ModelRunner runs instead of the module where the model has the plain shape.

Owns which models have that shape and how their weights are named. The arithmetic is in rust/cpu-kernels (decoder.rs);
that it is the model's own is proved on loading, by comparing logits (engine/model_check.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specbatch import _core
from specbatch.attention.backend import AttentionMetadata
from specbatch.models.shape import ModelShape

if TYPE_CHECKING:
    from specbatch.models.loading import LoadedModel

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_PARTS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def why_not(model: LoadedModel) -> str | None:
    """The reason why a model cannot run from packed weights; None when it can."""
    config: Any = model.config
    module: Any = model.module
    base: Any = module.base_model
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        return f"{model.dtype} on {model.device.type}"
    if model.shape.model_type not in MODEL_TYPES:
        return f"model type {model.shape.model_type}"
    if config.hidden_act not in ACTIVATIONS:
        return f"activation {config.hidden_act}"
    if config.intermediate_size % 16:
        return f"intermediate size {config.intermediate_size}"
    if model.shape.softcap or model.shape.sinks:
        return "attention with softcap or sinks"
    for layer in base.layers:
        for block, names in _PARTS.items():
            for name in names:
                linear = getattr(getattr(layer, block, None), name, None)
                if type(linear) is not nn.Linear:
                    return f"{block}.{name} is a {type(linear).__name__}"
        if any(getattr(layer.mlp, name).bias is not None for name in _PARTS["mlp"]):
            return "biases in the MLP"
    return None


def bfloat16_kernel() -> str | None:
    """The instructions that multiply bfloat16 with bfloat16 here; None where this processor has none."""
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 16,
        "intermediate_size": 16,
    }
    kernel = _core.CpuDecoder(
        **sizes, eps=1e-6, activation="silu", scale=1.0, bfloat16=True, threads=1
    ).kernel  # of a decoder without layers
    return kernel if "bfloat16" in kernel else None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """What a packed decoder is made of: from a module (`module_weights`) or straight from a checkpoint (lean.py)."""

    shape: ModelShape
    dtype: torch.dtype  # float32 or bfloat16
    intermediate_size: int
    eps: float
    activation: str
    scale: float  # of attention scores
    layers: Iterable[dict[str, Any]]  # arguments of CpuDecoder.add_layer, taken once, one layer after the other
    norm: NDArray[np.float32]
    head: Tensor  # [vocab, hidden]
    embedding: Tensor  # [vocab, hidden]; the head itself where they are tied
    cos: NDArray[np.float32]  # [max_model_len, rotary size]
    sin: NDArray[np.float32]


class DraftSizes(Protocol):
    """The part of specbatch._core.StepInfo that drafting reads."""

    @property
    def num_rows(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def draft_num_tokens(self) -> int: ...


class PackedDecoder:
    """Layers and head of a model; a ModelRunner binds it to its KV pages."""

    def __init__(self, weights: DecoderWeights, threads: int, *, int8: bool = False) -> None:
        """`int8`: round the layers' weights and activations, not the head. Raises ValueError, TypeError naming a size or
        dtype that does not fit."""
        shape = weights.shape
        self._embedding = weights.embedding
        self._embedding_bits = bits(weights.embedding)
        self._decoder = _core.CpuDecoder(
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=weights.intermediate_size,
            eps=weights.eps,
            activation=weights.activation,
            scale=weights.scale,
            bfloat16=weights.dtype == torch.bfloat16,
            threads=threads,
            int8=int8,
        )
        for layer in weights.layers:
            self._decoder.add_layer(**layer)
        self._vocab = int(weights.head.shape[0])
        self._decoder.set_head(weights.norm, bits(weights.head), screen=True)
        self._decoder.set_angles(weights.cos, weights.sin)
        self._storage: NDArray[np.float32] | NDArray[np.uint16] | None = None
        self._pages: list[_core.CpuLayerPages] = []

    def bind(self, pages: Tensor) -> None:
        """Use these pages [num_pages, layers, 2, block_size, kv_heads, head_dim] from now on."""
        flat = pages.as_strided((pages.untyped_storage().nbytes() // pages.element_size(),), (1,), 0)
        self._storage = bits(flat)
        self._pages = [_layer_pages(pages[:, i]) for i in range(pages.shape[1])]

    @property
    def kernel(self) -> str:
        """What multiplies, for people."""
        return f"packed weights, {self._decoder.kernel}, {self._decoder.threads} threads"

    def hidden(self, input_ids: Tensor, metadata: AttentionMetadata, wanted: Tensor | None = None) -> Tensor:
        """Run packed tokens [T]; keys and values go to the pages. Returns float32 [T, hidden], before the final norm.

        `wanted` [L]: only these tokens' rows are asked for, others may hold anything; None: all.
        """
        hidden = torch.nn.functional.embedding(input_ids, self._embedding).float()
        tree = metadata.tree_ancestors
        rows = metadata.num_rows
        assert self._storage is not None, "no pages are bound"
        self._decoder.forward(
            hidden.numpy(),
            storage=self._storage,
            pages=self._pages,
            positions=metadata.positions.numpy(),
            slot_mapping=metadata.slot_mapping.numpy(),
            query_start_loc=metadata.query_start_loc[: rows + 1].numpy(),
            seq_lens=metadata.seq_lens[:rows].numpy(),
            block_tables=metadata.block_tables[:rows].numpy(),
            tree_ancestors=None if tree is None else tree.numpy(),
            wanted=None if wanted is None else np.unique(wanted.int().numpy()),
        )
        return hidden

    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """Float32 logits [L, vocab] of tokens `indices` [L] (int32) of `hidden`."""
        out = torch.empty(indices.shape[0], self._vocab)
        self._decoder.logits(hidden.numpy(), indices.int().numpy(), out.numpy())
        return out

    def greedy(self, hidden: Tensor, indices: Tensor, vocab: int) -> Tensor:
        """Int32 [L]: the best of the first `vocab` tokens after `indices` of `hidden`, as `argmax_finite` of the logits."""
        out = torch.empty(indices.shape[0], dtype=torch.int32)
        self._decoder.best(hidden.numpy(), indices.int().numpy(), vocab, out.numpy())
        return out

    def draft(self, info: DraftSizes, host: Mapping[str, NDArray[np.int32]], vocab: int) -> None:
        """Greedy drafts of a step in one call, into `input_ids`: what as many calls of `hidden` and `greedy` would find.

        `host`: the step's arrays by their names in StepBuffers; vocab: tokens from here on are never proposed.
        """
        assert self._storage is not None, "no pages are bound"
        rows, tokens = info.num_rows, info.draft_num_tokens
        _core.cpu_draft(
            self._decoder,
            embedding=self._embedding_bits,
            limit=vocab,
            storage=self._storage,
            pages=self._pages,
            draft_input_ids=host["draft_input_ids"][:tokens],
            draft_positions=host["draft_positions"][:tokens],
            draft_slot_mapping=host["draft_slot_mapping"][:tokens],
            draft_query_start_loc=host["draft_query_start_loc"][: rows + 1],
            draft_seq_lens=host["draft_seq_lens"][:rows],
            draft_block_tables=host["draft_block_tables"][:rows],
            num_draft_tokens=host["num_draft_tokens"][:rows],
            query_start_loc=host["query_start_loc"][: rows + 1],
            input_ids=host["input_ids"][: info.num_tokens],
        )


def module_weights(model: LoadedModel) -> DecoderWeights:
    """The weights of a module of the plain shape. Raises ValueError for another (see `why_not`).

    NOTE: packing takes the weights of the module's layers away as they are packed: memory holds them once.
    """
    reason = why_not(model)
    if reason is not None:
        raise ValueError(f"not a model for packed weights: {reason}")
    module: Any = model.module
    config, base = model.config, module.base_model
    with torch.inference_mode():
        positions = torch.arange(model.shape.max_model_len)[None]
        cos, sin = base.rotary_emb(torch.zeros(1, 1, 1), positions)
    head = module.lm_head.weight
    if head is not base.embed_tokens.weight:
        _drop_weights(module.lm_head)
    return DecoderWeights(
        shape=model.shape,
        dtype=model.dtype,
        intermediate_size=config.intermediate_size,
        eps=config.rms_norm_eps,
        activation=config.hidden_act,
        scale=float(base.layers[0].self_attn.scaling),
        layers=_take_layers(model),
        norm=vector(base.norm.weight),
        head=head,
        embedding=base.embed_tokens.weight,
        cos=vector(cos[0]),
        sin=vector(sin[0]),
    )


def _take_layers(model: LoadedModel) -> Iterator[dict[str, Any]]:
    module: Any = model.module
    for layer, context in zip(module.base_model.layers, model.layers, strict=True):
        yield {**_layer_arrays(layer), "sliding_window": context.sliding_window}
        _drop_weights(layer)


def _layer_arrays(layer: Any) -> dict[str, Any]:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    arrays: dict[str, Any] = {
        "attention_norm": vector(layer.input_layernorm.weight),
        "mlp_norm": vector(layer.post_attention_layernorm.weight),
        "q": bits(attention.q_proj.weight),
        "k": bits(attention.k_proj.weight),
        "v": bits(attention.v_proj.weight),
        "o": bits(attention.o_proj.weight),
        "gate": bits(mlp.gate_proj.weight),
        "up": bits(mlp.up_proj.weight),
        "down": bits(mlp.down_proj.weight),
    }
    if any(p.bias is not None for p in projections):
        biases = [p.bias if p.bias is not None else torch.zeros(p.weight.shape[0]) for p in projections]
        arrays["qkv_bias"] = vector(torch.cat(biases))
    if attention.o_proj.bias is not None:
        arrays["o_bias"] = vector(attention.o_proj.bias)
    if getattr(attention, "q_norm", None) is not None:
        arrays["query_norm"] = vector(attention.q_norm.weight)
        arrays["key_norm"] = vector(attention.k_norm.weight)
    return arrays


def _drop_weights(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(part.weight.new_empty(0), requires_grad=False)


def _layer_pages(layer: Tensor) -> _core.CpuLayerPages:
    """Of one layer's pages [num_pages, 2, block_size, kv_heads, head_dim]."""
    _, _, block_size, kv_heads, head_dim = layer.shape
    return _core.CpuLayerPages(
        key_offset=int(layer[:, 0].storage_offset()),
        value_offset=int(layer[:, 1].storage_offset()),
        page_stride=layer.stride(0),
        block_size=block_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )


def vector(tensor: Tensor) -> NDArray[np.float32]:
    """A copy as float32, or the tensor's own memory where it is that."""
    array: NDArray[np.float32] = tensor.detach().float().contiguous().numpy()
    return array


def bits(tensor: Tensor) -> NDArray[np.float32] | NDArray[np.uint16]:
    """The tensor's own memory: float32, or bfloat16 as its bits."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        halves: NDArray[np.uint16] = tensor.view(torch.int16).numpy().view(np.uint16)
        return halves
    floats: NDArray[np.float32] = tensor.numpy()
    return floats
