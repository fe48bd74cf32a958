"""Profiles of training steps: time, memory and FLOPs by layer. The values exported here are saved, loaded and compared without torch."""

from sonde.profiler.profile_comparison import LayerChange as LayerChange
from sonde.profiler.profile_comparison import ProfileComparison as ProfileComparison
from sonde.profiler.profile_report import LayerCost as LayerCost
from sonde.profiler.profile_report import ProfileReport as ProfileReport
from sonde.profiler.profile_report import Section as Section
from sonde.profiler.profile_report import Span as Span
from sonde.profiler.profile_report import TimeSpread as TimeSpread
from sonde.profiler.profile_report import load as load
from sonde.profiler.profile_report import save as save
from sonde.profiler.recommendations import Bottleneck as Bottleneck
