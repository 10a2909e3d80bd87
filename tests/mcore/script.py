"""A training script as users write them: it does not mention the extension."""

import importlib
import os
import pickle
import sys
from pathlib import Path

package, case, folder = sys.argv[1:]
importlib.import_module(f"{package}.worker").train(
    pickle.loads(Path(case).read_bytes()), int(os.environ["RANK"]), Path(folder)
)
