"""What a profile is: times, memory and arithmetic by layer, as a value that is saved, loaded, compared and drawn without torch."""

from __future__ import annotations

from sonde.profiles.advice import Bottleneck as Bottleneck
from sonde.profiles.comparison import LayerChange as LayerChange
from sonde.profiles.comparison import ProfileComparison as ProfileComparison
from sonde.profiles.data import LayerCost as LayerCost
from sonde.profiles.data import ProfileReport as ProfileReport
from sonde.profiles.data import Section as Section
from sonde.profiles.data import Span as Span
from sonde.profiles.data import Spread as Spread
from sonde.profiles.file import load as load
from sonde.profiles.file import save as save
