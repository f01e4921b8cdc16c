"""Write a tiny pipeline with random weights into a folder, for model_family=auto to train by its own call.

    python examples/automatic/base.py flux2 demo/automatic/edits/base
    python examples/automatic/base.py wan demo/automatic/clips/base \
        --index '{"_class_name": "WanImageToVideoPipeline", "expand_timesteps": true}'
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from simpletuner.models.catalog.registry import TINY
from simpletuner.models.folder.diffusers_io import libraries_silenced
from simpletuner.models.tiny.build import build_tiny
from simpletuner.settings.declared.sections import Model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", help="whose pipeline it is; nothing else of the family is used")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--index", type=json.loads, default={}, help="other entries of model_index.json, as JSON")
    options = parser.parse_args()
    with libraries_silenced():
        build_tiny(Model(model_family=options.family, model_flavour=TINY), options.folder)
    index = options.folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | options.index, indent=2))


if __name__ == "__main__":
    main()
