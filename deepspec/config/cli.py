"""The entry of every Hydra command: arguments, composition, and errors into exit codes.

    @hydra_command("config")
    def main(cfg: RunConfig) -> None: ...

    if __name__ == "__main__":
        main()

Hydra, OmegaConf and the library are imported when they are needed, so ``--help`` and ``--cfg job`` answer in a moment.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING, Any

from deepspec.config.arguments import Arguments, groups_of, parse
from deepspec.config.compose import CONF
from deepspec.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, ConfigError, DeepSpecError, UserError
from deepspec.log import emit, get_logger, printable, rank, setup_logging

if TYPE_CHECKING:
    from collections.abc import Callable

    from omegaconf import DictConfig

log = get_logger(__name__)


def hydra_command(
    config_name: str, *, check_files: bool = True
) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Turn ``main(cfg)`` into a program that ends with one of the exit codes of ``errors.py``.

    Args:
        config_name: ``config`` (main gets a RunConfig), ``evaluate`` (EvaluateCommand), ``export`` (ExportCommand) or
            ``compare`` (CompareCommand).
        check_files: Refuse data files and local targets that are not there, before anything is loaded.
    """

    def decorate(main: Callable[[Any], None]) -> Callable[[], None]:
        def program() -> None:
            setup_logging()
            sys.exit(Command(main, config_name, check_files=check_files).run(sys.argv[1:]))

        program.__doc__ = main.__doc__
        return program

    return decorate


class Command:
    """One call of a command."""

    def __init__(self, main: Callable[[Any], None], config_name: str, *, check_files: bool = True) -> None:
        self.main, self.config_name, self.check_files = main, config_name, check_files
        self.arguments = Arguments()
        self.code = EXIT_OK

    def run(self, argv: list[str]) -> int:
        """Run and return the exit code."""
        try:
            self.arguments = parse(argv, groups_of(CONF))
            if self.arguments.help:
                self._help()
            else:
                self._hydra()
        except (Exception, KeyboardInterrupt) as error:
            return report(error)
        return self.code

    def _help(self) -> None:
        from deepspec.config.help import help_text

        emit(help_text(self.main, self.config_name))

    def _hydra(self) -> None:
        """Let Hydra compose and call ``_job``, once, or once a job of a sweep."""
        hydra = _import_hydra()
        from deepspec.config.compose import register_resolvers
        from deepspec.config.messages import composition_error
        from deepspec.config.rules import world_size

        if self.arguments.multirun and world_size() > 1:
            raise ConfigError(
                "--multirun: a sweep runs its jobs one after another in one process; start it without a launcher"
            )
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands exceptions on instead of exiting with 1
        register_resolvers()
        sys.argv = [sys.argv[0], *self.arguments.hydra]
        try:
            hydra.main(version_base="1.3", config_path=str(CONF), config_name=self.config_name)(self._job)()
        except (hydra.errors.HydraException, *_omegaconf_errors()) as error:
            raise composition_error(error, CONF, self.config_name) from error

    def _job(self, cfg: DictConfig) -> None:
        """Run one composed job. Errors are reported here, since Hydra would print its own line about them."""
        composed = False
        try:
            resolved = self._resolve(cfg)
            composed = True
            if self.arguments.show:
                self._show(cfg)
            else:
                self.main(resolved)
        except (Exception, KeyboardInterrupt) as error:
            code = report(error, composed=composed)
            if not self.arguments.multirun or code == EXIT_INTERRUPTED or isinstance(error, KeyboardInterrupt):
                raise SystemExit(code) from error
            self.code = self.code or code

    def _resolve(self, cfg: DictConfig) -> Any:
        from deepspec.config import resolve, schema, study

        complete = not self.arguments.show
        if self.config_name == "config":
            return resolve.resolve(cfg, complete=complete, check_files=self.check_files and complete)
        if self.config_name == "compare":
            return study.resolve_study(cfg, complete=complete)
        command = schema.EvaluateCommand if self.config_name == "evaluate" else schema.ExportCommand
        return resolve.resolve_command(cfg, command, complete=complete)

    def _show(self, cfg: DictConfig) -> None:
        """Print the job's config after the checks that need no files: ``--cfg job``."""
        from omegaconf import OmegaConf

        from deepspec.config.convert import Problems
        from deepspec.config.resolve import plain_values, with_defaults

        full = with_defaults(cfg) if self.config_name == "config" else cfg
        if self.arguments.show_resolved:
            full = OmegaConf.create(plain_values(full, Problems(complete=False)))
        emit(OmegaConf.to_yaml(full).rstrip())


def report(error: BaseException, *, composed: bool = False) -> int:
    """Say what went wrong in one clear message, and return the exit code.

    Every rank composes the same config and finds the same mistakes in it: the first one names them. What goes wrong
    once it is ``composed`` may be the trouble of one rank alone.
    """
    if isinstance(error, ConfigError):
        if composed or rank() == 0:
            _say("\n".join(_headed(error.problems)))
        return error.exit_code
    if isinstance(error, DeepSpecError):
        _say(str(error))
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        _say("stopped from the keyboard; what was saved before is kept")
        return EXIT_FAILURE
    if _disk_is_full(error):
        file = getattr(error, "filename", None)
        _say(f"the disk is full{f' ({file})' if file else ''}; free some space and run the command again")
        return EXIT_FAILURE
    log.error("unexpected error", exc_info=error)
    _say(f"{type(error).__name__}: {str(error).strip() or 'no message'} (the traceback is in the log)")
    return EXIT_FAILURE


def _disk_is_full(error: BaseException) -> bool:
    """Tell by the number, or by the words: safetensors and PyTorch raise errors of their own."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


def _headed(problems: list[str]) -> list[str]:
    if len(problems) == 1:
        return problems
    return [f"{len(problems)} mistakes in the configuration:", *(f"  - {p}" for p in problems)]


def _say(text: str) -> None:
    who = f"error (rank {rank()})" if rank() else "error"
    sys.stderr.write(f"{who}: {printable(text)}\n")
    sys.stderr.flush()


def _import_hydra() -> Any:
    try:
        import hydra
        import hydra.errors
    except ImportError as error:
        raise UserError(f'{error.name} is not installed: pip install "deepspec[train]"') from error
    return hydra


def _omegaconf_errors() -> tuple[type[Exception], ...]:
    from omegaconf.errors import OmegaConfBaseException

    return (OmegaConfBaseException,)
