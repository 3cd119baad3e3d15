"""Test plugin for SGLang: int2 mode with ``--enable-torch-compile`` on a CPU, where it is refused.

What is compiled is what a GPU server compiles, in one graph, or the server ends; in several where SGLang's own layers
cannot be traced as a whole. CPU_COMPILE_BACKEND is the backend of torch.compile, ``inductor`` by default; with
CPU_COMPILE_LOGS the code of every graph is in the log. Norms of queries and keys go the way of a GPU: through a kernel
that cannot be traced.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os

import torch


def traceable_as_a_whole():
    """Whether layers of this release are made of what torch.compile can trace. Newer ones hand a layer's output on in
    a record of msgspec, a type of C that no graph can make.
    """
    if importlib.util.find_spec("sglang.srt.layers.layer_boundary") is None:
        return True
    import msgspec
    from sglang.srt.layers.layer_boundary.residual.stream import Contribution

    return not issubclass(Contribution, msgspec.Struct)


@contextlib.contextmanager
def patch_model(model, enable_compile, num_tokens, tp_group):
    backend = os.environ.get("CPU_COMPILE_BACKEND", "inductor")
    whole = traceable_as_a_whole()
    print(f"cpu_compile: {backend}, {'one graph' if whole else 'graphs'} of {num_tokens} tokens", flush=True)
    os.environ.pop("TORCHDYNAMO_DISABLE", None)  # servers of tests compile nothing else
    torch._inductor.config.compile_threads = 1
    yield torch.compile(torch.no_grad()(model.forward), backend=backend, fullgraph=whole, dynamic=False)


@torch._dynamo.disable
def fused_inplace_qknorm(q, k, q_weight, k_weight, eps=1e-6, *, head_dim=0):
    for x, weight in ((q, q_weight), (k, k_weight)):
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        x.copy_(normed * weight.float())


def answer_platform_once():
    """Newer releases ask for the platform inside traced code. On a GPU the first question is answered by a constant; on
    a CPU it comes to one that cannot be traced.
    """
    from sglang.kernels import fused_op

    platform = getattr(fused_op, "_platform_key", None)
    if platform is not None:
        key = platform()
        fused_op._platform_key = lambda: key


def register():
    from sglang.srt.model_executor import cpu_graph_runner
    from sglang.srt.models import utils

    from sglang_oscar.attach import refusals
    from sglang_oscar.attention.backend import OscarAttentionBackend
    from sglang_oscar.attention.batch import DecodeTables

    def allocate(self, max_bs, max_num_tokens):
        self.graph_tables = DecodeTables(self.cache, max_bs)

    def capture(self, bs, *unused):
        self.batch = self.graph_tables.view(bs)

    if os.environ.get("CPU_COMPILE_LOGS"):
        torch._logging.set_logs(graph_code=True)
    refusals.ARGUMENTS[:] = [(check, what) for check, what in refusals.ARGUMENTS if "torch.compile" not in what]
    OscarAttentionBackend.init_cpu_graph_state = allocate
    OscarAttentionBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
    OscarAttentionBackend.init_forward_metadata_capture_cpu_graph = capture
    answer_platform_once()
    # Operators of sgl_kernel, which the stand-in does not have.
    cpu_graph_runner.register_fake_ops = lambda tp_size: None
    cpu_graph_runner.patch_model = patch_model
    utils._is_cuda = True
    utils.can_use_fused_inplace_qknorm = lambda head_dim, dtype: True
    utils.fused_inplace_qknorm = fused_inplace_qknorm
