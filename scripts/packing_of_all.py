"""Find the architectures that keep packed documents of a row separate: test data.packing=on with a tiny model of each.

packing_of_all.py [--page FILE]
"""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path

import transformers
from tiny_models import kinds, tiny_config
from transformers import AutoModelForCausalLM

from offload_trainer.errors import UserError
from offload_trainer.model.probes.rows import refuse_crossing

_PAGE = """\
# Several documents in a row

Look up whether `data.packing=on` works with your architecture. A start tests if the model keeps packed documents apart
(`offload_trainer/model/probes/rows.py`); this page lists the results for a tiny model of every causal language model
of transformers {version}, each with its defaults shrunk by `scripts/tiny_models.py`.
`scripts/packing_of_all.py --page docs/packing.md` writes it. A run always tests its own model, since layers of another
kind than the class has by default may change the result.

{stay} keep documents apart, within 1e-4 of the largest logit in fp32:

{exact}

{number} are refused: recurrent models, whose state passes from document to document, models that do not take positions
or masks from `position_ids`, and models of which no tiny one runs.

{refused}
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.filterwarnings("ignore")
    found: dict[str, str] = {}
    for name, kind in sorted(kinds().items()):
        try:
            config = tiny_config(kind)
            config._attn_implementation = None
            refuse_crossing(AutoModelForCausalLM.from_config(config), trust_remote_code=False)
            found[name] = ""
        except UserError as error:
            found[name] = str(error)
        except Exception as error:  # raised by transformers, which cannot build it from defaults
            found[name] = f"{type(error).__name__}: {error}"
        print(f"{name}: {found[name] or 'apart'}", flush=True)
    exact = [name for name, why in found.items() if not why]
    refused = [name for name, why in found.items() if why]
    page = _PAGE.format(
        version=transformers.__version__,
        stay=len(exact),
        exact=", ".join(exact) + ".",
        number=len(refused),
        refused=", ".join(refused) + ".",
    )
    if asked.page:
        asked.page.write_text(page)


if __name__ == "__main__":
    main()
