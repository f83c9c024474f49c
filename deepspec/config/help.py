"""The text of ``--help``: what the command does, what can be chosen, and what the exit codes mean."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING

from deepspec.config.compose import CONF
from deepspec.config.messages import choices, groups

if TYPE_CHECKING:
    from collections.abc import Callable

_CODES = """Exit codes
  0   the work is done
  1   failure (a full disk too)
  2   a mistake in the command, the config or the data; the message names the key to change
  75  interrupted and saved; the same command goes on"""

_HYDRA = """Settings are written key=value; every key is explained in docs/config.md.
  --cfg job [--resolve]    print the whole config and stop (loads nothing)
  --multirun a=1,2 b=3,4   run every combination, one after another
  --config-dir DIR         look for recipes and groups in DIR as well"""


_OFTEN = {
    "config": """Often set
  data.limit=200 train.max_steps=50          a short trial
  engine.micro_batch_size=2                  when memory is short
  paths.run=FOLDER seed=1                    another run beside the first
  tracker=wandb tracker.mode=offline         metrics to W&B""",
    "evaluate": """Often set
  evaluate.limit=5 evaluate.timing_prompts=0 a short look
  evaluate.temperature=0.7 evaluate.gamma=3  other ways of decoding
  data.test=FILE out=FOLDER                  other prompts, another place for the report""",
    "compare": """Often set
  study.hours=1.5                            less time; the same command goes on where it stopped
  paths.runs=FOLDER                          another place for the study's folder
  study.variants.NAME.seeds=[0,1,2]          more seeds of a variant; ~study.variants.NAME leaves one out
  --config-dir DIR study=NAME                your own study, DIR/study/NAME.yaml""",
    "export": """Often set
  export.profile=bf16 | fp16 | fp16_int8 | fp16_int8_full | int8_dynamic | int4_mlp
                                             what the package holds (docs/quantisation.md)
  export.layout=universal                    a folder for vLLM and SGLang instead (docs/serving.md)
  source=FOLDER                              bring a drafter of another project in
  export.out=FOLDER                          where it goes""",
}


def help_text(main: Callable[..., object], config_name: str) -> str:
    """Return the help of a command; its module's docstring says what it does and how to call it."""
    module = sys.modules[main.__module__]
    parts = [text for doc in (module.__doc__, main.__doc__) if (text := inspect.cleandoc(doc or ""))]
    if config_name == "config":
        parts += [_offered("Recipes", "recipe"), _groups()]
    if config_name == "compare":
        parts.append(_offered("Studies", "study"))
    return "\n\n".join([*parts, _OFTEN[config_name], _HYDRA, _CODES])


def _offered(title: str, group: str) -> str:
    lines = [f"  {group}={name:<28} {_summary(group, name)}" for name in choices(group, CONF)]
    return "\n".join([title, *lines])


def _summary(group: str, name: str) -> str:
    """Return the first comment line of a file that is not Hydra's package line."""
    lines = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line), "")


def _groups() -> str:
    lines = [f"  {g:<9} {' | '.join(choices(g, CONF))}" for g in groups(CONF) if g not in ("recipe", "paths")]
    return "\n".join(["Groups, for example target=path target.path=FOLDER data=jsonl data.path=FILE", *lines])
