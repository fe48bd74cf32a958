"""Hooks that a person writes: when this happens in that layer, do this. `HookBuilder` says it, `Hooks` does it."""

from sonde.tools.hooks.alerts import Alert as Alert
from sonde.tools.hooks.hook import AlertSeverity as AlertSeverity
from sonde.tools.hooks.hook import Hook as Hook
from sonde.tools.hooks.hook import HookAction as HookAction
from sonde.tools.hooks.hook import HookTrigger as HookTrigger
from sonde.tools.hooks.hook_actions import HookStatus as HookStatus
from sonde.tools.hooks.hook_builder import HookBuilder as HookBuilder
from sonde.tools.hooks.hook_events import HookEvent as HookEvent
from sonde.tools.hooks.hook_events import HookResult as HookResult
from sonde.tools.hooks.hook_events import TrainingStopped as TrainingStopped
from sonde.tools.hooks.hook_manager import Hooks as Hooks
