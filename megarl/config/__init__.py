"""The typed configuration and the errors of the command line. Nothing here imports torch."""

from megarl.config.check import check_config
from megarl.config.load import dump_config, load_config
from megarl.config.schema import Config

__all__ = ["Config", "check_config", "dump_config", "load_config"]
