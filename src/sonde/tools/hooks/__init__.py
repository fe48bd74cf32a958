"""User-defined hooks: `HookBuilder` defines trigger, layers and actions; `Hooks` attaches them to a model and runs them."""

from sonde.tools.hooks.alerts import Alert
from sonde.tools.hooks.hook_actions import HookStatus
from sonde.tools.hooks.hook_builder import AlertSeverity, HookAction, HookBuilder, HookSpec, HookTrigger
from sonde.tools.hooks.hook_events import HookEvent, HookResult, TrainingStopped
from sonde.tools.hooks.hook_manager import Hooks

__all__ = [
    "Alert", "AlertSeverity", "HookAction", "HookBuilder", "HookEvent", "HookResult", "HookSpec", "HookStatus", "HookTrigger", "Hooks",
    "TrainingStopped",
]  # fmt: skip
