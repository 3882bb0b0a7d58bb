"""The engine's public names."""

from engine.config import EngineConfig
from engine.llm import LLM
from engine.output import EngineStats, RequestOutput
from engine.sampling_params import SamplingParams

__all__ = ["LLM", "EngineConfig", "EngineStats", "RequestOutput", "SamplingParams"]
