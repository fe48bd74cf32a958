"""Hooks that a person writes: when this happens in that layer, do this. `HookBuilder` says it, `Hooks` does it."""

from sonde.workbench.hooks.actions import HookStatus as HookStatus
from sonde.workbench.hooks.alerts import Alert as Alert
from sonde.workbench.hooks.builder import HookBuilder as HookBuilder
from sonde.workbench.hooks.events import HookEvent as HookEvent
from sonde.workbench.hooks.events import HookResult as HookResult
from sonde.workbench.hooks.events import TrainingStopped as TrainingStopped
from sonde.workbench.hooks.hook import AlertSeverity as AlertSeverity
from sonde.workbench.hooks.hook import Hook as Hook
from sonde.workbench.hooks.hook import HookAction as HookAction
from sonde.workbench.hooks.hook import HookTrigger as HookTrigger
from sonde.workbench.hooks.hooks import Hooks as Hooks
