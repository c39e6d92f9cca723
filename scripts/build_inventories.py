"""Count every catalogue model on torch's meta device and write memcore/data/inventories.json.

Run it after a change of the catalogue or of the transformers version:
``python -m scripts.build_inventories``.
"""

import json
from pathlib import Path

from memcore.counting import count_config
from memcore.models import catalogue, load_inventory

TARGET = Path(__file__).parent.parent / "memcore" / "data" / "inventories.json"


def main() -> None:
    """Count all models and write the file, one line each so that a change shows as one."""
    lines = []
    for name, model in catalogue().items():
        if model.config is None:
            continue
        counted = count_config({"config": model.config})["inventory"]
        lines.append(f"{json.dumps(name)}: {json.dumps(counted, separators=(',', ':'))}")
        inventory = load_inventory(counted)
        print(f"{name:55} {inventory.n_params:>18,} {inventory.n_active:>18,} {model.n_params or 0:>18,}")
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
