"""Puts `checkpoints.toml`, which lies beside the packages, into the built package."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            self.copy_file("checkpoints.toml", str(Path(self.build_lib, "deformops_models")))


setup(cmdclass={"build_py": BuildPy})
