"""How logits become a loss: what libraries do that differs in memory.

A kind says what runs as one; where logits become FP32 and whether what is shifted is copied are apart from it, since
libraries combine them (versions as read):

    transformers 4.49 and newer     unfused, FP32 in the loss (loss/loss_utils.py, ForCausalLMLoss: labels are shifted)
    transformers 4.46 to 4.48       unfused, FP32 in the loss, a shifted copy of the logits (the same function)
    transformers before 4.46        unfused, FP32 in the model's forward, a shifted copy (modeling_llama.py); some
                                    models stay in 16 bit (modeling_gpt_bigcode.py)
    torchtitan                      unfused, FP32 in the loss (components/loss.py, cross_entropy_loss)
    torchtune                       unfused, FP32 in the model (modules/transformer.py, TransformerDecoder.unembed)
    litgpt, pretraining             unfused (utils.py, chunked_cross_entropy, chunk_size=0)
    litgpt, full fine-tuning        chunked_ce, a shifted copy (finetune/full.py)
    litgpt, LoRA                    chunked (finetune/lora.py: lm_head_chunk_size=128)
    all three                       FP32 in the model: Lightning Fabric 2.1 casts what a module returns (fabric/
                                    wrappers.py, _FabricModule.forward: convert_output, to torch's default dtype)
    torchtune's chunked loss        chunked, FP32 in the loss (ce_chunked_output_loss.py)
    unsloth's kernel                fused_ce (kernels/cross_entropy_loss.py, Fast_CrossEntropyLoss)
    Megatron, without tensor parallelism    fused_ce, FP32 in the loss (tensor_parallel/cross_entropy.py)
    Liger Kernel up to 0.4          fused, each chunk in FP32, a shifted copy of the hidden states
    Liger Kernel from 0.6           fused, in the dtype of the computation
"""

from enum import StrEnum
from typing import TYPE_CHECKING

from memcore.i18n import gettext as _
from memcore.scenario.fields import refuse

if TYPE_CHECKING:
    from memcore.scenario.parts import Workload


class Loss(StrEnum):
    """UNFUSED: the head, then torch's cross entropy over all logits. CHUNKED_CE: all logits, then the cross entropy
    of one chunk of tokens after the other. CHUNKED: head and cross entropy both in chunks. FUSED_CE: a kernel whose
    gradient takes the logits' place. FUSED: head and cross entropy in one, chunk by chunk, with their gradients made
    in the forward."""

    UNFUSED = "unfused"
    CHUNKED_CE = "chunked_ce"
    CHUNKED = "chunked"
    FUSED_CE = "fused_ce"
    FUSED = "fused"


class Upcast(StrEnum):
    """Where 16-bit logits become FP32. MODEL: in its forward, which lets go of the 16-bit ones. LOSS: in the loss
    function, beside those that the forward still holds. NONE: nowhere."""

    MODEL = "model"
    LOSS = "loss"
    NONE = "none"


# Each one kernel, which torch does not compile.
OWN_KERNELS = (Loss.FUSED_CE, Loss.FUSED)
IN_CHUNKS = (Loss.CHUNKED_CE, Loss.CHUNKED)
# torchtune, modules/loss/ce_chunked_output_loss.py, CEWithChunkedOutputLoss: num_output_chunks.
DEFAULT_CHUNKS = 8


def usual_upcast(loss: Loss) -> Upcast:
    """Where logits become FP32 if nothing else is said: what the newest libraries do."""
    return Upcast.NONE if loss is Loss.FUSED else Upcast.LOSS


def check_loss(workload: "Workload") -> None:
    """Raise UserError for a setting of the loss that does nothing for its kind."""
    loss = workload.loss
    if workload.loss_chunks is not None and loss not in IN_CHUNKS:
        message = _("{field} is {value}, which does nothing when workload.loss is {loss}.")
        raise refuse("workload.loss_chunks", message, value=workload.loss_chunks, loss=loss)
    if workload.logits_upcast is Upcast.MODEL and loss is Loss.FUSED:
        message = _("{field} is {value}, but a fused loss makes its logits itself: choose loss or none.")
        raise refuse("workload.logits_upcast", message, value=workload.logits_upcast)
    if workload.shifted_copy and loss is Loss.CHUNKED:
        message = _("{field} is set, which does nothing when workload.loss is {loss}.")
        raise refuse("workload.shifted_copy", message, loss=loss)
    if workload.loss_compiled and (loss in OWN_KERNELS or workload.shifted_copy):
        message = _("{field} is set, which is not predicted for a loss that is a kernel of its own, or that copies.")
        raise refuse("workload.loss_compiled", message)
