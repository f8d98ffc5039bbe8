"""Tree of tokens that a small Llama decoder has read: prompts share the nodes of equal prefixes.

Needs torch. A node is a token after all tokens above it, so its states never change. They are
computed once, for all prompts of a batch and for later batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

# Nodes of a path, and drafts that may follow it: lists of nodes.
PathWithDrafts: TypeAlias = tuple[Sequence[int], Sequence[Sequence[int]]]

MAX_BYTES = 64 * 1024 * 1024
MIN_ROWS = 2048


class PackedRows:
    """Paths with their drafts, one path per row, padded on the right."""

    def __init__(self, rows: Sequence[PathWithDrafts]) -> None:
        packed = [[*path, *chain.from_iterable(drafts)] for path, drafts in rows]
        shape = len(rows), max(map(len, packed))
        self.index = np.zeros(shape, np.int64)
        self.lengths = np.array([[len(path)] for path, _ in rows])
        # Where the path or draft of each node begins.
        self.begins = np.zeros(shape, np.int64)
        requested = np.zeros(shape, bool)
        for number, ((path, drafts), nodes) in enumerate(zip(rows, packed, strict=True)):
            self.index[number, : len(nodes)] = nodes
            requested[number, len(path) - 1 : len(nodes)] = True
            begin = len(path)
            for draft in drafts:
                self.begins[number, begin : begin + len(draft)] = begin
                begin += len(draft)
        self._is_node = np.arange(shape[1]) < np.array([[len(nodes)] for nodes in packed])
        self.requested = QueryNodes(self, requested)

    def from_node(self, start: int) -> QueryNodes:
        """Return the nodes from number `start` on, each once and in order."""
        found = np.flatnonzero(self._is_node & (self.index >= start))
        _, first = np.unique(self.index.flat[found], return_index=True)
        chosen = np.zeros(self.index.shape, bool)
        chosen.flat[found[first]] = True
        return QueryNodes(self, chosen)


class QueryNodes:
    """Queries of packed rows, in order: their `nodes`, the `depths` of these, and `mask`,
    (rows, 1, queries, nodes), which is True where a query may attend: at its path and draft. Rows
    without a query are left out: samples of one prompt read its nodes once, in the first row."""

    def __init__(self, packed: PackedRows, chosen: npt.NDArray[np.bool_]) -> None:
        self._chosen = chosen
        used = chosen.any(axis=1)
        index, begins_of = packed.index[used], packed.begins[used]
        lengths, chosen = packed.lengths[used], chosen[used]
        rows, columns = np.nonzero(chosen)
        counts = chosen.sum(axis=1)
        slots = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        shape = len(counts), int(counts.max())
        positions, numbers = np.zeros((2, *shape), np.int64)
        positions[rows, slots] = columns
        numbers[rows, slots] = np.arange(len(rows))
        self._shape, self._is_full = shape, len(rows) == numbers.size
        self._numbers = torch.from_numpy(numbers.ravel())
        self._valid = torch.from_numpy(rows * shape[1] + slots)
        self._index, self._path_shape = torch.from_numpy(index.ravel()), index.shape

        begins = begins_of[rows, columns]
        depths = np.where(begins, lengths[rows, 0] + columns - begins, columns)
        self.depths = torch.from_numpy(depths.astype(np.float32))
        self.nodes = torch.from_numpy(index[rows, columns])
        at, own = positions[..., None], np.take_along_axis(begins_of, positions, 1)[..., None]
        nodes = np.arange(index.shape[1])
        mask = (nodes <= at) & ((nodes < lengths[..., None]) | (nodes >= own))
        self.mask = torch.from_numpy(mask)[:, None]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QueryNodes) and np.array_equal(self._chosen, other._chosen)

    def padded(self, queries: Tensor) -> Tensor:
        """Return (rows, longest count, width) of the queries."""
        found = queries if self._is_full else queries.index_select(0, self._numbers)
        return found.reshape(*self._shape, -1)

    def path_states(self, states: Tensor) -> Tensor:
        """Return (rows, nodes, width), the states of all nodes of the rows."""
        return states.index_select(0, self._index).view(*self._path_shape, -1)

    def flat(self, padded: Tensor) -> Tensor:
        """Return (queries, heads * width) of (rows, longest count, heads, width)."""
        found = padded.flatten(0, 1).flatten(1)
        return found if self._is_full else found.index_select(0, self._valid)


class TokenTree:
    """Nodes of read tokens with their keys and values, for a decoder of Llama layers on a CPU.

    The layers do the work of transformers' `LlamaModel` except what no logit depends on. Equal
    tokens are projected once by the first layer, whose input is their embedding. The last layer
    computes keys and values of all nodes, and the rest only where logits are requested.

    A path is the list of nodes from the first token on. `trim`, before each batch, forgets all
    nodes once their states exceed `max_bytes`.
    """

    def __init__(self, model: Any, max_bytes: int = MAX_BYTES) -> None:
        text = model.base_model.language_model
        config = text.config
        # Rotary angles are computed at any position, but the model was trained on these.
        self.max_tokens = int(config.max_position_embeddings)
        self._embedding, self._frequencies = text.embed_tokens, text.rotary_emb.inv_freq
        # Sharp attention amplifies rounding. The last layer has few queries: doubles cost little.
        precisions = [torch.float32] * (len(text.layers) - 1) + [torch.float64]
        self._layers = [
            _Layer(layer, config, precision)
            for layer, precision in zip(text.layers, precisions, strict=True)
        ]
        self._norm, self._head = _Norm(text.norm), model.lm_head.weight
        width = self._layers[0].kv_width
        self._widths = [config.hidden_size, *[width] * (2 * len(self._layers))]
        self._max_nodes = max_bytes // (4 * sum(self._widths))
        # The last layer's input, then keys and values of each layer: (nodes, width).
        # Explicit dtypes: transformers changes torch's default dtype while it loads another model.
        self._tables = [self._head.new_empty(0, width) for width in self._widths]
        self.clear()

    @classmethod
    def for_model(cls, model: Any) -> TokenTree | None:
        """Return a tree for a FastVLM model with a plain Llama decoder in float32 on a CPU, as the
        bundled models have, or None for another model."""
        text: Any = getattr(model.base_model, "language_model", None)
        plain = (
            model.config.model_type == "fast_vlm"
            and text.config.model_type == "llama"
            and text.rotary_emb.rope_type == "default"
            and text.config.hidden_act == "silu"
            and model.dtype == torch.float32
            and model.device.type == "cpu"
        )
        return cls(model) if plain else None

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self._keys)

    def trim(self) -> None:
        """Forget all nodes if they are too many. Paths of earlier batches become invalid."""
        if self.size > self._max_nodes // 2:  # the other half is for the next batch
            self.clear()

    def clear(self) -> None:
        """Forget all nodes."""
        self._nodes: dict[tuple[int, int], int] = {}
        self._keys: list[int] = []
        self._image_keys: dict[str, list[int]] = {}
        self._read = 0  # number of nodes that have states
        self._first = _FirstInputs(self._embedding, self._layers[0])

    def image_keys(self, sha256: str, features: Tensor) -> list[int]:
        """Return the keys of an image's tokens; `features` are (tokens, hidden)."""
        if sha256 not in self._image_keys:
            self._image_keys[sha256] = self._first.add(features)
        return self._image_keys[sha256]

    def extend(self, path: list[int], keys: Iterable[int]) -> None:
        """Append the nodes of more tokens to a path. A key is a token id or of an image."""
        nodes, all_keys = self._nodes, self._keys
        parent = path[-1] if path else -1
        for key in keys:
            parent = nodes.setdefault((parent, key), len(all_keys))
            if parent == len(all_keys):
                all_keys.append(key)
            path.append(parent)

    def logits(self, rows: Sequence[PathWithDrafts]) -> Tensor:
        """Return the logits after the last node of each path, and after each node of its drafts:
        (nodes, vocabulary), row by row.

        The rows must include all nodes added since the last call, in the order of `extend`.
        """
        packed = PackedRows(rows)
        requested = packed.requested
        if self._read < self.size:
            new = packed.from_node(self._read)
            self._read_new(requested if new == requested else new)
        layer, hidden = self._layers[-1], self._tables[0].index_select(0, requested.nodes)
        queries = layer.rotated(layer.queries(hidden), self._angles(requested.depths))
        keys, values = self._tables[-2:]
        hidden = layer.output(hidden, queries, keys, values, requested)
        return linear(self._norm(hidden), self._head)

    def _read_new(self, rows: QueryNodes) -> None:
        """Compute the states of new nodes, which are the queries of the rows."""
        start, self._read = self._read, self.size
        new = slice(start, self._read)
        self._tables = [_reserved(one, self._read, self._max_nodes) for one in self._tables]
        angles = self._angles(rows.depths)
        hidden, projected = self._first.rows(self._keys[start:])
        for number, layer in enumerate(self._layers):
            is_last = layer is self._layers[-1]
            if number:
                projected = (layer.keys_and_values if is_last else layer.all_projections)(hidden)
            keys, values = self._tables[1 + 2 * number : 3 + 2 * number]
            turned = layer.rotated(projected[:, : -layer.kv_width], angles)
            keys[new] = turned[:, -layer.kv_width :]
            values[new] = projected[:, -layer.kv_width :]
            if is_last:
                self._tables[0][new] = hidden
            else:
                hidden = layer.output(hidden, turned[:, : -layer.kv_width], keys, values, rows)

    def _angles(self, depths: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the rotary angles, (nodes, 1, width / 2)."""
        angles = depths[:, None, None] * self._frequencies
        return angles.cos(), angles.sin()


class _FirstInputs:
    """Embeddings of keys with their projections in the first layer, which do not depend on earlier
    tokens: each is computed once. Key -1 - i stands for vector i that was added."""

    def __init__(self, embedding: Any, layer: _Layer) -> None:
        self._embedding, self._layer = embedding, layer
        self._vectors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._hidden = embedding.weight.new_empty(0, layer.hidden_width)
        self._projected = embedding.weight.new_empty(0, layer.projected_width)

    def add(self, vectors: Tensor) -> list[int]:
        """Return new keys for vectors (n, hidden)."""
        start = len(self._vectors)
        self._vectors += vectors.unbind()
        return [-1 - i for i in range(start, len(self._vectors))]

    def rows(self, keys: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the embeddings and the projections of keys."""
        numbers = self._numbers
        new = [key for key in dict.fromkeys(keys) if key not in numbers]
        if new:
            have, count = len(numbers), len(numbers) + len(new)
            numbers.update(zip(new, range(have, count), strict=True))
            self._hidden = _reserved(self._hidden, count, MIN_ROWS)
            self._projected = _reserved(self._projected, count, MIN_ROWS)
            self._hidden[have:count] = inputs = self._embedded(new)
            self._projected[have:count] = self._layer.all_projections(inputs)
        index = torch.tensor([numbers[key] for key in keys])
        return self._hidden.index_select(0, index), self._projected.index_select(0, index)

    def _embedded(self, keys: Sequence[int]) -> Tensor:
        tokens: Tensor = self._embedding(torch.tensor([max(key, 0) for key in keys]))
        if images := [i for i, key in enumerate(keys) if key < 0]:
            tokens[images] = torch.stack([self._vectors[-1 - keys[i]] for i in images])
        return tokens


def _reserved(table: Tensor, count: int, least: int) -> Tensor:
    """Return the table with room for `count` rows. Memory that is never written takes no place."""
    have, width = table.shape
    more = max(count, 2 * have, least) - have
    return table if count <= have else torch.cat([table, table.new_empty(more, width)])


class _Norm:
    """RMS norm with the weights of a module."""

    def __init__(self, norm: Any) -> None:
        self._weight: Tensor = norm.weight
        self._eps = float(norm.variance_epsilon)

    def __call__(self, hidden: Tensor) -> Tensor:
        # One pass over the rows: `rms_norm` of torch makes several on a CPU.
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        scale = length.square_().div_(hidden.shape[-1]).add_(self._eps).rsqrt_()
        normed: Tensor = (hidden * scale).mul_(self._weight)
        return normed


class _Layer:
    """Weights of one decoder layer. Its projections of queries, keys and values are one matrix."""

    def __init__(self, layer: Any, config: Any, precision: torch.dtype) -> None:
        attention, self._mlp = layer.self_attn, layer.mlp
        self._precision = precision  # of the attention
        self._width = int(attention.head_dim)
        self._kv_heads = int(config.num_key_value_heads)
        self.kv_width = self._kv_heads * self._width
        self._before = _Norm(layer.input_layernorm)
        self._between = _Norm(layer.post_attention_layernorm)
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        with torch.no_grad():
            self._weight = torch.cat([part.weight for part in parts])
            has_bias = parts[0].bias is not None
            self._bias = torch.cat([part.bias for part in parts]) if has_bias else None
        self._out = attention.o_proj
        self.projected_width, self.hidden_width = self._weight.shape

    def all_projections(self, hidden: Tensor) -> Tensor:
        return linear(self._before(hidden), self._weight, self._bias)

    def keys_and_values(self, hidden: Tensor) -> Tensor:
        return self._projected(hidden, slice(-2 * self.kv_width, None))

    def queries(self, hidden: Tensor) -> Tensor:
        return self._projected(hidden, slice(None, -2 * self.kv_width))

    def _projected(self, hidden: Tensor, part: slice) -> Tensor:
        bias = None if self._bias is None else self._bias[part]
        return linear(self._before(hidden), self._weight[part], bias)

    def rotated(self, rows: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Apply the rotary embedding to rows (nodes, heads * width)."""
        cosine, sine = angles
        halves = len(rows), -1, 2, self._width // 2
        first, second = rows.reshape(halves).unbind(2)
        turned = rows.new_empty(rows.shape).view(halves)
        torch.mul(first, cosine, out=turned[:, :, 0]).addcmul_(second, sine, value=-1)
        torch.mul(second, cosine, out=turned[:, :, 1]).addcmul_(first, sine)
        return turned.flatten(1)

    def output(
        self, hidden: Tensor, queries: Tensor, keys: Tensor, values: Tensor, rows: QueryNodes
    ) -> Tensor:
        """Return the layer's output for its inputs and rotated queries, both in the rows' order."""
        found = scaled_dot_product_attention(
            self._by_head(rows.padded(queries)),
            self._by_head(rows.path_states(keys)),
            self._by_head(rows.path_states(values)),
            attn_mask=rows.mask,
            enable_gqa=True,
        )
        hidden = self._out(rows.flat(found.transpose(1, 2)).float()) + hidden
        normed = self._between(hidden)
        inner = silu(self._mlp.gate_proj(normed)).mul_(self._mlp.up_proj(normed))
        change: Tensor = self._mlp.down_proj(inner)
        return change.add_(hidden)

    def _by_head(self, rows: Tensor) -> Tensor:
        """Return (paths, heads, nodes, width) of (paths, nodes, heads * width)."""
        return rows.view(*rows.shape[:2], -1, self._width).transpose(1, 2).to(self._precision)
