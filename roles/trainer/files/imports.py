"""Imports the packages that are named on the command line and finds the trainer's script, without running it."""

import importlib
import importlib.util
import sys

for name in sys.argv[1].split(","):
    importlib.import_module(name.replace("-", "_"))
sys.path.insert(0, "")
if importlib.util.find_spec("scripts.base_train") is None:
    sys.exit("there is no scripts/base_train.py among the trainer's files")
