"""Imports the packages that are named on the command line and finds the trainer's script, without running it."""

import importlib
import importlib.metadata
import importlib.util
import re
import sys

wanted = {re.sub("[-_.]+", "-", name).lower() for name in sys.argv[1].split(",")}
for module, packages in importlib.metadata.packages_distributions().items():
    of = {re.sub("[-_.]+", "-", name).lower() for name in packages}
    if wanted & of and module.isidentifier() and not module.startswith("_"):
        importlib.import_module(module)
sys.path.insert(0, "")
if importlib.util.find_spec("scripts.base_train") is None:
    sys.exit("there is no scripts/base_train.py among the trainer's files")
