"""The question: model, hardware, parallelism, recipe, offload and workload of one training run."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from memcore.engine_options import ENGINE_OPTIONS, own_convention
from memcore.recipes import ConventionName
from memcore.scenario.checks import check
from memcore.scenario.engine_configs import (
    DeepSpeedConfig,
    EngineConfig,
    Fsdp1Config,
    Fsdp2Config,
    LlmcConfig,
    ZeroConfig,
)
from memcore.scenario.fields import Part
from memcore.scenario.filling import engine_config_of, filled_parallelism, filled_recipe
from memcore.scenario.parts import Hardware, Method, Model, Offload, Parallelism, Recipe, Workload


class Scenario(Part):
    """One training run. Every part has defaults but the model."""

    model: Model
    hardware: Hardware = Hardware()
    parallelism: Parallelism = Field(default_factory=Parallelism)
    engine_config: EngineConfig | None = None
    recipe: Recipe = Recipe()
    offload: Offload = Offload()
    workload: Workload = Workload()

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        """Fill what the engine and the number of GPUs imply, before the parts are made."""
        if not isinstance(data, Mapping):
            return data
        given = data.get("parallelism", {})
        hardware = data.get("hardware", {})
        if not isinstance(given, Mapping) or not isinstance(hardware, Mapping):
            return data
        config = data.get("engine_config")
        parallelism = filled_parallelism(given, hardware.get("gpus", 1), config)
        engine = parallelism["engine"]
        return {
            **data,
            "parallelism": parallelism,
            "engine_config": engine_config_of(config, engine),
            "recipe": filled_recipe(data.get("recipe", {}), data.get("model"), engine),
        }

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check(self)
        return self

    @property
    def own_convention(self) -> ConventionName:
        """What the engine trains this in of its own, whatever the recipe says."""
        recipe = self.recipe
        return own_convention(
            self.parallelism.engine,
            adapts=recipe.method is not Method.FULL,
            bare=self.model.is_bare_count,
            fp8=recipe.fp8 is not None,
        )

    def has_convention(self, name: ConventionName) -> bool:
        """Whether a training loop with the engine has that convention."""
        return name is self.own_convention or name in ENGINE_OPTIONS[self.parallelism.engine].conventions

    @property
    def zero_config(self) -> ZeroConfig:
        """DeepSpeed's settings, its defaults where none were given."""
        config = self.engine_config
        return config.zero_optimization if isinstance(config, DeepSpeedConfig) else ZeroConfig()

    @property
    def llm_c_config(self) -> LlmcConfig:
        """llm.c's options, its defaults where none were given."""
        return self.engine_config if isinstance(self.engine_config, LlmcConfig) else LlmcConfig()

    @property
    def fsdp1_config(self) -> Fsdp1Config:
        """FSDP1's settings, its defaults where none were given."""
        return self.engine_config if isinstance(self.engine_config, Fsdp1Config) else Fsdp1Config()

    @property
    def shards_on_host(self) -> bool:
        """Whether FSDP keeps shards, their gradients and the optimizer's states on the host."""
        return self.fsdp1_config.cpu_offload or self.fsdp2_config.cpu_offload

    @property
    def fsdp2_config(self) -> Fsdp2Config:
        """FSDP2's settings, its defaults where none were given."""
        return self.engine_config if isinstance(self.engine_config, Fsdp2Config) else Fsdp2Config()
