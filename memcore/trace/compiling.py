"""torch.compile in a trace: what a compiled function saves for its backward, and which buffers its kernels take.

Worker processes only: imports torch.

Dynamo and AOTAutograd run as they do on a GPU, on fake tensors, with Inductor's decompositions and its partitioner
(torch 2.13, _functorch/partitioners.py, min_cut_rematerialization_partition): what is saved for the backward is what
they save. In Inductor's place a graph is run operation by operation, and of pointwise operations only those results
are counted that Inductor's kernels write (torch 2.13, _inductor/scheduler.py, fuse_nodes; ir.py, realize_input): what
a matrix product, an attention or another kernel of its own reads, and what the graph returns. A pointwise kernel
writes over an operand that it is the last to read (scheduler.py, SchedulerNode.allocate, inplace_buffers), but not
over what a function was given: of a backward's inputs only over those that its forward made (graph.py, placeholder:
bw_donated_idxs), not over what that was given itself, such as the logits of a loss.
"""

import logging
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import get_donated_idxs
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

from memcore.trace.recorder import Recorder

_LOGGER = logging.getLogger("torch._dynamo")
_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "argmax", "any", "all", "prod", "var_mean", "var"})
# Loads at computed places, which Inductor fuses like pointwise operations (torch 2.13, _inductor/lowering.py); what is
# scattered is so into zeros here, which it makes a choice of (fx_passes/post_grad.py, scatter_upon_const_tensor).
_LOADS = frozenset(
    {
        "gather",
        "index",
        "embedding",
        "clone",
        "full",
        "full_like",
        "iota",
        "cat",
        "convert_element_type",
        "slice_scatter",
        "scatter",
        "select_scatter",
        "constant_pad_nd",
    }
)
_VIEWS = frozenset({"_unsafe_view", "reshape"})


class Compiler:
    """Compiles functions of one trace, until its block ends. `fuses`: count what Inductor's kernels write, else every
    operation's result. Nothing is counted before there is a `recorder`."""

    def __init__(self, *, fuses: bool = True) -> None:
        self.recorder: Recorder | None = None
        self._fuses = fuses
        self._quiet = ExitStack()
        # One for all: functions with the same code are compiled once.
        self._backend: Any = aot_autograd(
            fw_compiler=partial(self._run_by_node, backward=False),
            bw_compiler=partial(self._run_by_node, backward=True),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )

    def __enter__(self) -> None:
        # torch warns of gradients that its compiler looks for in vain, and of operations in place under a policy.
        self._quiet.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        self._quiet.callback(_LOGGER.setLevel, _LOGGER.level)
        _LOGGER.setLevel(logging.ERROR)

    def __exit__(self, *_error: object) -> None:
        """Nothing that was compiled is kept."""
        self._quiet.close()
        torch._dynamo.reset()  # noqa: SLF001  no public way to forget all

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled when it is first called."""
        wrapped: Callable[..., Any] = torch.compile(function, backend=self._backend, dynamic=False)
        return wrapped

    def _run_by_node(self, module: fx.GraphModule, _inputs: Any, *, backward: bool) -> Callable[..., Any]:
        written = _written(module.graph) if self._fuses else None
        donated = frozenset((get_donated_idxs() or ()) if backward else ())
        held = _held(module.graph, written, donated) if written is not None else {}

        def run(inputs: list[Any]) -> Any:
            return _Interpreter(module, written, held, self.recorder).boxed_run(inputs)

        run._boxed_call = True  # type: ignore[attr-defined]  # noqa: SLF001  it lets go of its inputs itself
        return run


class _Interpreter(fx.Interpreter):
    """Runs a graph node by node; of fused operations the recorder sees those results that are `written`. `held`: the
    inputs that the kernel of a node is the last to read, which are there until it is done."""

    def __init__(
        self,
        module: fx.GraphModule,
        written: frozenset[fx.Node] | None,
        held: Mapping[fx.Node, Sequence[fx.Node]],
        recorder: Recorder | None,
    ) -> None:
        super().__init__(module)
        self._written = written
        self._held = held
        self._given: dict[fx.Node, Any] = {}
        self._recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        """Run one node. What dropout or attention does again with the same random numbers runs without them."""
        result = self._result(n)
        for read in self._held.get(n, ()):
            self._given.pop(read, None)
        return result

    def run(self, *args: Any, initial_env: dict[fx.Node, Any] | None = None, **kwargs: Any) -> Any:
        """Run the graph, whose inputs are all in `initial_env`."""
        held = {read for reads in self._held.values() for read in reads}
        self._given = {node: value for node, value in (initial_env or {}).items() if node in held}
        return super().run(*args, initial_env=initial_env, **kwargs)

    def _result(self, n: fx.Node) -> Any:
        if n.target is run_and_save_rng_state:
            (function, *args), kwargs = self.fetch_args_kwargs_from_env(n)
            return torch.empty(0), function(*args, **kwargs)
        if n.target is run_with_rng_state:
            (_state, function, *args), kwargs = self.fetch_args_kwargs_from_env(n)
            return function(*args, **kwargs)
        if self._recorder is None or self._written is None or not _is_fused(n):
            return super().run_node(n)
        with self._recorder.unseen():
            result = super().run_node(n)
        if n in self._written:
            # What is read here for the last time is written over.
            self.env.update(dict.fromkeys(self.user_to_last_uses.get(n, ())))
            self._recorder.see(result)
        return result


def _held(
    graph: fx.Graph, written: frozenset[fx.Node], donated: frozenset[int]
) -> dict[fx.Node, list[fx.Node]]:  # fmt: skip
    """The inputs of a graph by the node whose kernel is the last to read them, but for those that are donated, by
    their places, and may be written over."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    last: dict[fx.Node, fx.Node] = {}
    # What a node's result is made of, as far as kernels have not written it.
    made_of: dict[fx.Node, set[fx.Node]] = {
        node: set() if place in donated else {node} for place, node in enumerate(inputs)
    }
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        reads = {source for read in node.all_input_nodes for source in made_of.get(read, ())}
        if _is_fused(node) and node not in written:
            made_of[node] = reads
        else:
            last |= dict.fromkeys(reads, node)
    found: dict[fx.Node, list[fx.Node]] = {}
    for node, by in last.items():
        found.setdefault(by, []).append(node)
    return found


def _is_fused(node: fx.Node) -> bool:
    return node.op == "call_function" and (_is_view(node) or _name(node) in _LOADS or _is_pointwise(node))


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_view(node: fx.Node) -> bool:
    return node.target is operator.getitem or getattr(node.target, "is_view", False) or _name(node) in _VIEWS


def _name(node: fx.Node) -> str:
    return getattr(node.target, "_opname", "") if node.op == "call_function" else ""


def _written(graph: fx.Graph) -> frozenset[fx.Node]:
    """The fused nodes whose results are read by other kernels, or returned."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        own_kernel = node.op == "call_function" and not _is_fused(node) and _name(node) not in _REDUCTIONS
        if node.op == "output" or own_kernel:
            for read in node.all_input_nodes:
                source = read
                while source.op == "call_function" and _is_view(source):
                    source = source.all_input_nodes[0]
                if source.op == "call_function" and _is_fused(source):
                    found.add(source)
    return frozenset(found)
