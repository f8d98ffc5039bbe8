"""RACC where only scores tell the right passage: `python -m benchmarks.racc_scores --work DIR`.

On `contradictions`, passages about one name and relation state different things, and the right one
has the highest score with a probability, the reliability. Compressors with and without RGCA start
from the bundled one and are trained for each seed and reliability; those without RGCA ignore
scores, so one per seed is enough. DIR holds compressors and the score of each item: a stopped run
resumes. See docs/experiments/racc.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bottega.bundled import bundled_compressor, bundled_folder
from bottega.compression import RaccModel, save
from bottega.compression.objective import TrainingConfig, TrainingObjective
from bottega.compression.persistence import load
from bottega.compression.training import train
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.metrics.intervals import Estimate, accuracy, paired_difference
from bottega.evaluation.planning import plan
from bottega.evaluation.runner import evaluate
from bottega.evaluation.training_data import GoldPassageSampler
from bottega.generation import bundled
from bottega.generation.loaded import LoadedModel
from bottega.knowledge import KnowledgeBase
from bottega.recipes import Classifier
from bottega.recipes.racc_training import training_objective
from bottega.types import Sampling
from training.compressor import racc_objective
