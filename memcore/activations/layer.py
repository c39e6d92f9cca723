"""Activations in closed form: what a layer keeps for its backward, from the layer's own shapes.

Symbols, per token: h hidden size, q and k widths of queries and of keys (values alike), a heads, f width of
the MLP's inside, E experts of which e are used, V vocabulary, w bytes of the dtype of the computation.
Per run: s sequence length, b sequences, T = b s tokens, L layers.

What is kept follows transformers 5.24's own modules (it is held against the tensors that real layers save);
arXiv 2205.05198, section 4.1, is the special case of LayerNorm, one GELU, dropout and 16-bit softmax:
s b h (34 + 5 a s / h). Known deviation: rotary tables and token ids, a few bytes per token for the whole model,
are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memcore.inventory import Block, Role, Shapes, Tensor, TensorKind

_QKV = {"c_attn", "query_key_value", "qkv_proj", "Wqkv", "qkv"}
_OUT = {"o_proj", "out_proj", "c_proj", "dense", "wo"}
_LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", *_QKV, *_OUT, *_LATENT}
# Tensors of an expert's inner width that its activation keeps beside the joint gate and up output, where
# the experts' activation is not the plain act(gate) * up (transformers 5.24, modeling_gpt_oss.py,
# GptOssExperts: clamps, a scaled sigmoid and their products).
_EXPERT_EXTRA = {"GptOssForCausalLM": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Something that a layer keeps: bytes for each token, and for each pair of tokens of one sequence."""

    name: str
    per_token: float = 0.0
    per_pair: float = 0.0

    def num_bytes(self, tokens: int, seq_len: int) -> int:
        """Bytes for `tokens` tokens in sequences of `seq_len`."""
        return round(self.per_token * tokens + self.per_pair * tokens * seq_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerForm:
    """One decoder layer in closed form, in bytes per token unless said otherwise.

    `kept`: what its backward needs. `input_bytes`: its input, which checkpointing keeps instead.
    `forward_extra`: what is alive for a moment beside the kept tensors, at the most; `backward_extras`: the same in the
    backward of the MLP and of the attention, of which one is at its fullest when the other is not.
    """

    kept: tuple[Kept, ...]
    input_bytes: int
    forward_extra: Kept
    backward_extras: tuple[Kept, ...]

    def backward_extra(self, tokens: int, seq_len: int) -> int:
        """Bytes beside the kept tensors at the fullest instant of the layer's backward."""
        return max(extra.num_bytes(tokens, seq_len) for extra in self.backward_extras)

    def total(self, tokens: int, seq_len: int) -> int:
        """Bytes that the layer keeps."""
        return sum(kept.num_bytes(tokens, seq_len) for kept in self.kept)

    def scores(self, tokens: int, seq_len: int) -> int:
        """The share of it that grows with the square of the sequence: plain attention's scores."""
        return sum(round(kept.per_pair * tokens * seq_len) for kept in self.kept)

    @property
    def per_token(self) -> float:
        """Bytes kept per token, scores left out."""
        return sum(kept.per_token for kept in self.kept)

    @property
    def per_pair(self) -> float:
        """Bytes kept per pair of tokens: plain attention's scores."""
        return sum(kept.per_pair for kept in self.kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """How a layer computes, beside its shapes: bytes `w` of the computation, which attention, what is trained.

    `adapted`: names of the linear modules that carry adapters; None where everything is trained.
    `adapter_bytes`: bytes of an adapter's dtype.
    """

    width: int
    attention: str
    adapted: frozenset[str] | None = None
    adapter_bytes: int = 4
    rank: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Widths:
    """A layer's widths, read from its parameters. `latent`: what latent attention projects down to."""

    hidden: int
    queries: int
    keys: int
    values: int
    attended: int
    heads: int
    kv_heads: int
    fused_qkv: bool
    latent: int = 0


def layer_form(block: Block, shapes: Shapes, traits: Traits, model_class: str = "") -> LayerForm | None:
    """The closed form of a decoder layer. None where its attention or its MLP is not of a known make, or not all."""
    if not _is_plain(block):
        return None
    widths = _widths(block, shapes)
    mlp = _mlp(block, shapes, traits, model_class)
    if widths is None or mlp is None:
        return None
    kept = (*_norms(block, shapes, widths, traits), *_attention(block, shapes, widths, traits), *mlp.kept)
    return LayerForm(
        kept=tuple(part for part in (*kept, *_adapters(block, traits)) if part.per_token or part.per_pair),
        input_bytes=traits.width * widths.hidden,
        forward_extra=_forward_extra(shapes, widths, traits),
        backward_extras=_backward_extras(shapes, widths, mlp, traits),
    )


def _is_plain(block: Block) -> bool:
    """Whether there is one attention, of projections alone, and nothing beside it and the MLP: no output gate, no
    convolution, no second attention to an encoder, no projections of the layer's own. What is more would keep more.
    """
    matrices = [t.module for t in block.tensors if t.role is Role.ATTENTION and _is_matrix(t)]
    once = len(set(matrices)) == len(matrices)
    others = any(
        (t.role is Role.OTHER and _is_matrix(t))
        or (t.role is Role.ATTENTION and not _is_matrix(t) and len(t.shape) > 1)
        or (t.role is Role.MLP and len(t.shape) > 2)
        for t in block.tensors
    )
    return once and set(matrices) <= _PROJECTIONS and not others


def _widths(block: Block, shapes: Shapes) -> _Widths | None:
    linear = {t.module: t for t in block.tensors if t.role is Role.ATTENTION and _is_matrix(t)}
    outs = {name: _in_out(t) for name, t in linear.items()}
    attended = next((size for name, (size, _out) in outs.items() if name in _OUT), 0)
    if not attended or not shapes.num_heads:
        return None
    head, heads, kv_heads = shapes.head_dim, shapes.num_heads, shapes.num_kv_heads

    def widths(queries: int, keys: int, values: int, *, fused: bool = False, latent: int = 0) -> _Widths:
        return _Widths(
            hidden=shapes.hidden_size, queries=queries, keys=keys, values=values, attended=attended, heads=heads,
            kv_heads=kv_heads, fused_qkv=fused, latent=latent,
        )  # fmt: skip

    if "kv_b_proj" in outs:
        # Latent attention: keys are made as wide as queries, values are a view of kv_b_proj's output.
        latent = sum(outs[name][0] for name in ("q_b_proj", "kv_b_proj") if name in outs)
        projected = outs.get("q_b_proj") or outs.get("q_proj")
        if projected is None:
            return None
        queries = projected[1]
        return widths(queries, queries, outs["kv_b_proj"][1], latent=latent)
    if {"q_proj", "k_proj", "v_proj"} <= outs.keys():
        return widths(outs["q_proj"][1], outs["k_proj"][1], outs["v_proj"][1])
    if _QKV & outs.keys():
        return widths(heads * head, kv_heads * head, kv_heads * head, fused=True)
    return None


def _is_matrix(tensor: Tensor) -> bool:
    return tensor.kind in (TensorKind.LINEAR, TensorKind.CONV1D)


def _in_out(tensor: Tensor) -> tuple[int, int]:
    rows, columns = tensor.shape
    return (columns, rows) if tensor.kind is TensorKind.LINEAR else (rows, columns)


def norm_bytes(kind: str, trained: bool, width: int) -> int:
    """What a norm keeps of each value, its output aside: see Shapes.norm. A frozen weight's gradient needs no
    normalised values; in FP32 a cast to FP32 makes no copy, and the input itself is kept."""
    if kind == "layer":
        return width
    if kind == "rms":
        return 4 + (width if trained else 0)
    return 8 if trained else 4


def _norms(block: Block, shapes: Shapes, widths: _Widths, traits: Traits) -> Iterator[Kept]:
    trained = traits.adapted is None
    each = norm_bytes(shapes.norm, trained, traits.width)
    across: list[Tensor] = []
    per_head: list[Tensor] = []
    for tensor in block.tensors:
        if tensor.kind is TensorKind.NORM and tensor.name.endswith("weight"):
            (per_head if tensor.name.endswith(("q_norm.weight", "k_norm.weight")) else across).append(tensor)
    if shapes.norm == "layer" and shapes.parallel:
        # Both norms of a parallel layer keep the same input.
        across = across[:1]
    yield Kept(name="norms", per_token=sum(each * tensor.numel + 4 for tensor in across))
    if per_head:
        yield Kept(
            name="head_norms",
            per_token=each * (widths.queries + widths.keys) + 4 * (widths.heads + widths.kv_heads),
        )


def _attention(block: Block, shapes: Shapes, widths: _Widths, traits: Traits) -> Iterator[Kept]:
    """Inputs of the projections, then what the kernel keeps. Flash: q, k, v, its output and an FP32 log-sum-exp;
    memory-efficient the same, with grouped keys and values repeated for every query head; plain: the scores too."""
    w = traits.width
    inputs = 1 if shapes.parallel and _single_norm(block) else 2
    read = w * (inputs * widths.hidden + widths.latent)
    yield Kept(name="linear_inputs", per_token=read if traits.adapted is None else 0)
    keys, values = widths.keys, widths.values
    grouped = widths.kv_heads < widths.heads
    if traits.attention == "eager" or (traits.attention == "memory_efficient" and grouped):
        # Keys and values are repeated for every query head, and laid out anew.
        keys, values = widths.queries, widths.attended
    elif widths.fused_qkv and shapes.rotary:
        # The values are a view of the joint projection, whose whole output they keep alive.
        values = widths.queries + widths.keys + widths.values
    # Plain attention's own result is kept as the output projection's input alone, which a frozen one does not need.
    result = 0 if traits.attention == "eager" and traits.adapted is not None else widths.attended
    yield Kept(name="attention", per_token=w * (widths.queries + keys + values + result))
    if traits.attention == "eager":
        yield Kept(name="attention_scores", per_pair=widths.heads * _score_bytes(shapes, w))
    else:
        yield Kept(name="log_sum_exp", per_token=4 * widths.heads)
    if shapes.hidden_dropout:
        # Two masks of one byte: after attention and after the MLP.
        yield Kept(name="dropout_masks", per_token=2 * widths.hidden)


def _single_norm(block: Block) -> bool:
    return sum(t.kind is TensorKind.NORM and t.name.endswith("weight") for t in block.tensors) == 1


def _score_bytes(shapes: Shapes, width: int) -> int:
    """Bytes of plain attention's scores per head and pair: the softmax's result; its cast to the dtype of the
    computation where it ran in FP32, or with dropout that one's mask and result; a soft cap's tanh."""
    upcast = shapes.softmax_fp32 and width < 4
    softmax = 4 if upcast else width
    weighted = 1 + width if shapes.attention_dropout else width if upcast else 0
    return softmax + weighted + (width if shapes.softcap else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mlp:
    kept: tuple[Kept, ...]
    gated: bool
    inner: int


def _mlp(block: Block, shapes: Shapes, traits: Traits, model_class: str) -> _Mlp | None:
    dense = [t for t in block.tensors if t.role is Role.MLP and len(t.shape) == 2]
    experts = [t for t in block.tensors if t.role is Role.EXPERTS and len(t.shape) == 3]
    kept: list[Kept] = []
    gated, inner = _gate_and_inner(dense, shapes)
    if inner:
        product = traits.adapted is None
        kept.append(Kept(name="mlp", per_token=_inner_bytes(shapes, gated, inner, traits.width, product)))
    if experts:
        expert_inner = _expert_inner(experts, shapes)
        if expert_inner is None:
            return None
        kept.extend(_experts(experts, expert_inner, shapes, traits, model_class))
        gated, inner = True, max(inner, experts[0].experts_used * min(t.shape[2] for t in experts))
    if not kept:
        return None
    return _Mlp(kept=tuple(kept), gated=gated, inner=inner)


def _gate_and_inner(dense: Sequence[Tensor], shapes: Shapes) -> tuple[bool, int]:
    """Whether the MLP has a gate, and its inner width: the input size of the projection back to h."""
    if not dense:
        return False, 0
    back = [_in_out(t)[0] for t in dense if _is_matrix(t) and _in_out(t)[1] == shapes.hidden_size]
    inner = max(back, default=0)
    out = sum(_in_out(t)[1] for t in dense if _is_matrix(t) and _in_out(t)[1] != shapes.hidden_size)
    return out >= 2 * inner > 0, inner


def _inner_bytes(shapes: Shapes, gated: bool, inner: int, width: int, product: bool) -> float:
    """The activation's own tensors, with a gate its result and the other half, and the product that the last
    projection reads (which only a trained weight keeps)."""
    tensors = shapes.activation_kept + (2 if gated else 0) + (1 if product else 0)
    return width * inner * tensors


def _experts(experts: Sequence[Tensor], inner: int, shapes: Shapes, traits: Traits, model_class: str) -> Iterator[Kept]:
    """Grouped experts with balanced routing: each token's e copies of the input and of the result, the inner
    tensors of the e experts, and the router's FP32 probabilities."""
    used, held, w = experts[0].experts_used, experts[0].experts_held, traits.width
    extra = _EXPERT_EXTRA.get(model_class, 0)
    tensors = shapes.activation_kept + 2 + 1 + extra
    yield Kept(name="experts", per_token=w * used * (tensors * inner + 2 * shapes.hidden_size))
    # Indices, weights and probabilities of the router, in FP32 and 64-bit integers; its input in FP32.
    copy = 4 * shapes.hidden_size if shapes.router_fp32 and w < 4 else 0
    yield Kept(name="router", per_token=4 * held + (8 + 3 * 8 + 4 + 4) * used + copy)


def _expert_inner(experts: Sequence[Tensor], shapes: Shapes) -> int | None:
    down = next((t for t in experts if "down" in t.name or t.name.endswith("w2")), None)
    if down is None:
        return None
    return next(size for size in down.shape[1:] if size != shapes.hidden_size or down.shape[1] == down.shape[2])


def _adapters(block: Block, traits: Traits) -> Iterator[Kept]:
    """Each adapted module keeps its input, in the adapter's dtype (a copy where that differs), and A's result.

    Source: peft 0.21, tuners/lora/layer.py, Linear.forward and _cast_input_dtype.
    """
    if traits.adapted is None:
        return
    total = 0.0
    for tensor in block.tensors:
        if _is_matrix(tensor) and tensor.role is not Role.HEAD and traits.adapted & {tensor.module, "all-linear"}:
            total += traits.adapter_bytes * (_in_out(tensor)[0] + traits.rank)
    yield Kept(name="adapters", per_token=total)


def _forward_extra(shapes: Shapes, widths: _Widths, traits: Traits) -> Kept:
    """Plain attention's raw scores and their FP32 copy beside the result of the softmax."""
    if traits.attention != "eager":
        return Kept(name="forward_extra")
    copies = traits.width + (4 if shapes.softmax_fp32 and traits.width < 4 else 0)
    return Kept(name="forward_extra", per_pair=widths.heads * copies)


def _backward_extras(shapes: Shapes, widths: _Widths, mlp: _Mlp, traits: Traits) -> tuple[Kept, ...]:
    """The gradients that are alive while the layer's kept tensors still are: of its output, and of the MLP's
    inside (two of its width with a gate, one without). Plain attention needs two gradients of its scores, by when the
    MLP's tensors are gone; in FP32, by when the 16-bit probabilities are gone too."""
    w = traits.width
    inside = Kept(name="mlp_extra", per_token=w * (widths.hidden + (2 if mlp.gated else 1) * mlp.inner))
    if traits.attention != "eager":
        return (inside,)
    scores = 8 - w if shapes.softmax_fp32 and w < 4 else 2 * w
    gone = sum(kept.per_token for kept in mlp.kept)
    return inside, Kept(name="scores_extra", per_token=w * widths.hidden - gone, per_pair=widths.heads * scores)
