"""Training a compressor in front of frozen models."""

from bottega.compression.training.course import Course
from bottega.compression.training.lessons import Lesson, Lessons
from bottega.compression.training.teaching import Teaching
from bottega.compression.training.training import Progress, train

__all__ = ["Course", "Lesson", "Lessons", "Progress", "Teaching", "train"]
