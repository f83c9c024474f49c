"""Runs in the environment of vLLM: load drafters into its classes, or generate with one.

python in_vllm.py load JOBS.json       one after the other; each writes its tensors and what it found
python in_vllm.py generate JOB.json
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.utils import get_draft_quant_config
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config


class AnyKernel:
    """Stands in for the kernels that multiply with packed INT8, of which none runs on a CPU; loading needs a name."""

    def __init__(self, *_: object, **__: object) -> None: ...


def engine_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Return what engine and generator share."""
    speculative = {"method": job["method"], "model": job["folder"], "num_speculative_tokens": job["tokens"]}
    return {
        "model": job["target"],
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": job["dtype"],
        "max_model_len": job["max_length"],
        "max_num_seqs": 1,
        "speculative_config": speculative,
    }


def load(job: dict[str, Any]) -> dict[str, Any]:
    """Build vLLM's class for a folder, fill it with NaN, load, and tell what stayed NaN."""
    config = EngineArgs(**engine_arguments(job)).create_engine_config()
    draft = config.speculative_config.draft_model_config
    config.quant_config = get_draft_quant_config(config)
    with set_current_vllm_config(config), set_default_torch_dtype(draft.dtype):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{job['out']}.store", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        model = initialize_model(vllm_config=config, model_config=draft)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan if parameter.is_floating_point() else 77)
        get_model_loader(config.load_config).load_weights(model, draft)
    state = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, job["out"])
    return {
        "class": type(model).__name__,
        "nan": sorted(n for n, t in state.items() if t.is_floating_point() and bool(t.isnan().any())),
        "taps": list(get_eagle3_aux_layers_from_config(config.speculative_config) or ()),
    }


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Continue prompts greedily and return the tokens, the drafts and how many tokens were kept at each place."""
    llm = LLM(**engine_arguments(job), disable_log_stats=False, enable_prefix_caching=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], ignore_eos=True, detokenize=False)
    texts = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    found = {metric.name: metric for metric in llm.get_metrics()}
    return {
        "tokens": [list(text.outputs[0].token_ids) for text in texts],
        "drafts": found["vllm:spec_decode_num_drafts"].value,
        "accepted": found["vllm:spec_decode_num_accepted_tokens"].value,
        "by_place": found["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
    }


def main(what: str, path: str) -> None:
    """Do what ``path`` asks for and write the answer beside it."""
    jobs = json.loads(Path(path).read_text())
    torch.accelerator.empty_cache = lambda: None  # there is none to empty
    if what == "load":  # the class is filled, no runner runs it: what needs Triton or a GPU may be named
        VllmConfig._get_v1_model_runner_unsupported_features = lambda _: []
        compressed_tensors_wNa16.choose_mp_linear_kernel = lambda _: AnyKernel
    answer = [load(job) for job in jobs] if what == "load" else generate(jobs)
    Path(path).with_suffix(".answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
