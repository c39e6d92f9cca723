"""What llm.c takes for activations: all of it at once, before the first step, and for as long as the program runs.

Source: github.com/karpathy/llm.c, train_gpt2.cu, fill_in_activation_sizes: of f1e2ace6 (May 2025), and for the layout
"2024-05" of 1f442fd (30 April 2024) with fill_in_grad_act_sizes, as the runs of its pull request 309 had it. Until
ba4e2c0 (June 2024) each layer kept what its two projections gave, too; until cbe82e7 plain attention had a buffer of
its own for the gradient of one layer's scores.

Symbols as in memcore.symbols.
"""

from memcore.inventory import Inventory
from memcore.recipes import DType
from memcore.scenario import Scenario
from memcore.states import precision_of
from memcore.terms import Category, Formula, Term, product

_SOURCE = "llm.c f1e2ace6, train_gpt2.cu, fill_in_activation_sizes"
_EARLIER = "llm.c 1f442fd, train_gpt2.cu, fill_in_activation_sizes and fill_in_grad_act_sizes"
# Tensors of the hidden size that a layer keeps: queries with keys and values, the attention's result, the MLP's first
# product, and the sums after attention and MLP; beside these the norms' results, what GELU gives (four of them), and
# in the earlier layout what both projections give.
_KEPT, _NORMS, _GELU, _PROJECTIONS = 3 + 1 + 4 + 2, 2, 4, 2


def llm_c_terms(scenario: Scenario, inventory: Inventory) -> list[Term]:
    """The terms, the same at each moment."""
    shapes, work, config = inventory.shapes, scenario.workload, scenario.llm_c_config
    earlier, recompute = config.layout == "2024-05", config.recompute
    width = precision_of(scenario.recipe).convention.compute_dtype.size
    tokens, hidden, layers = work.micro_batch * work.seq_len, shapes.hidden_size, shapes.num_layers
    in_layer = _KEPT + (_NORMS if recompute < 2 else 0) + (_GELU if recompute < 1 else 0)
    in_layer += _PROJECTIONS if earlier else 0
    # Once for all layers: the embedding and the last norm's result, and where GELU is run again, room for its result.
    once = 2 + (0 if recompute < 1 else _GELU)
    statistics = width if earlier else DType.FP32.size
    per_token = width * hidden * (layers * in_layer + once) + statistics * (4 * layers + 3)
    pairs = tokens * work.seq_len * shapes.num_heads if work.attention == "eager" else 0
    if not pairs:
        per_token += DType.FP32.size * layers * shapes.num_heads  # what cuDNN keeps of a row of scores
    output = max(3 * hidden, shapes.num_heads * work.seq_len, shapes.vocab_size)
    own_scores = pairs if earlier else 0
    # Gradients of one layer: of its MLP's width and of its result.
    gradients = width * (tokens * (4 + 1) * hidden + own_scores)
    rows = (
        ("saved_activations", Category.ACTIVATIONS, tokens * per_token, r"\sum_i T\,a_i", product(tokens, per_token)),
        (
            "attention_scores",
            Category.ACTIVATIONS,
            width * layers * pairs,
            r"\sum_i b\,s^2\,c_i",
            product(layers, width * pairs),
        ),
        ("layer_temporaries", Category.ACTIVATIONS, gradients, r"A_{moment}", f"{gradients:,}"),
        ("logits_loss", Category.LOSS, width * tokens * output, r"A_{loss}", product(width, tokens * output)),
    )
    source = _EARLIER if earlier else _SOURCE
    return [
        Term(
            name=name,
            category=category,
            bytes_at=num_bytes,
            formula=Formula(symbols=symbols, numbers=numbers),
            source=source,
        )
        for name, category, num_bytes, symbols, numbers in rows
    ]
