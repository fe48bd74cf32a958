"""What a profile is: times, memory and arithmetic by layer, as a value that is saved, loaded, compared and drawn without torch."""

from __future__ import annotations

from sonde.profiler.profile_comparison import LayerChange as LayerChange
from sonde.profiler.profile_comparison import ProfileComparison as ProfileComparison
from sonde.profiler.profile_file import load as load
from sonde.profiler.profile_file import save as save
from sonde.profiler.profile_report import LayerCost as LayerCost
from sonde.profiler.profile_report import ProfileReport as ProfileReport
from sonde.profiler.profile_report import Section as Section
from sonde.profiler.profile_report import Span as Span
from sonde.profiler.profile_report import Spread as Spread
from sonde.profiler.recommendations import Bottleneck as Bottleneck
