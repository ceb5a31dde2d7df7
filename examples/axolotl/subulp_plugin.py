"""An axolotl plugin that trains with subulp.AdamW; the settings are those of the YAML file.

axolotl's ``BasePlugin.create_optimizer`` looks like the place, but nothing calls it (read: 067b021, 24 July 2026). The
trainer is built before it makes its optimizer, so this hands it the class then.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

import subulp


class SubulpPlugin(BasePlugin):  # type: ignore[misc]
    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        options = cfg.optim_args or {}
        if not isinstance(options, dict):
            raise TypeError(f"optim_args is {options!r}: write it as a mapping, so that its values keep their types.")
        arguments = trainer.args
        keywords = {
            "lr": arguments.learning_rate,
            "betas": (arguments.adam_beta1, arguments.adam_beta2),
            "eps": arguments.adam_epsilon,
            "weight_decay": arguments.weight_decay,  # of the groups that decay; axolotl gives the others 0
        }
        trainer.optimizer_cls_and_kwargs = (subulp.AdamW, keywords | dict(options))
