"""Write the package that ``test_stored_package.py`` keeps: ``python -m tests.unit.inference.store_package``.

A random target of a few thousand weights and a random drafter, exported as ``deepspec.export`` does it. Only to be run
when the format of packages changes on purpose, with a new ``VERSION``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from deepspec.contracts import Sample
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.evaluation.acceptance import Prompt
from deepspec.export.calibrate import CalibrationMaterial
from deepspec.export.card import Origin
from deepspec.export.run import export_package
from deepspec.export.verify import Material
from deepspec.inference.open_target import open_target
from tests.helpers import tiny_model, tiny_tokenizer

FOLDER = Path(__file__).parents[2] / "golden" / "package"
TARGET, PACKAGE = FOLDER / "target", FOLDER / "fp16_int8"
MASK_ID = 96


def main() -> None:
    """Write target and package."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True}
    tiny_model("llama", layers=4, hidden=16, **shape).to(torch.bfloat16).save_pretrained(TARGET)
    tiny_tokenizer().save_pretrained(TARGET)
    target = open_target(TARGET, torch.device("cpu"))
    torch.manual_seed(1)
    config = DSparkConfig(num_layers=1, gamma=3, markov_rank=4)
    drafter = config.build(target.info, (0, 1, 2), MASK_ID)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:  # noqa: PLR2004 - matrices
            parameter.data.normal_(std=0.2)
    drafter.bind(target.head)
    texts = torch.randint(4, 96, (40, 30), generator=torch.Generator().manual_seed(2)).tolist()
    samples = [Sample(str(n), tuple(ids), (False,) * 5 + (True,) * 25) for n, ids in enumerate(texts[:4])]
    prompts = [Prompt(str(n), "random", ids[:9]) for n, ids in enumerate(texts)]
    export_package(
        drafter,
        config,
        target.info,
        target,
        PACKAGE,
        Material(samples, texts[:2]),
        profile="fp16_int8",
        template_options={"quick": True},
        calibration=CalibrationMaterial(prompts, "validation", 16),
        include_embeddings=True,
        max_length_change=1.0,
        origin=Origin("none", "random", 0, "target"),
    )


if __name__ == "__main__":
    main()
