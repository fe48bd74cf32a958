"""User-defined hooks: `HookBuilder` defines trigger, layers and actions; `Hooks` attaches them to a model and runs them."""

from sonde.tools.hooks.alerts import Alert as Alert
from sonde.tools.hooks.hook_actions import HookStatus as HookStatus
from sonde.tools.hooks.hook_builder import AlertSeverity as AlertSeverity
from sonde.tools.hooks.hook_builder import HookAction as HookAction
from sonde.tools.hooks.hook_builder import HookBuilder as HookBuilder
from sonde.tools.hooks.hook_builder import HookSpec as HookSpec
from sonde.tools.hooks.hook_builder import HookTrigger as HookTrigger
from sonde.tools.hooks.hook_events import HookEvent as HookEvent
from sonde.tools.hooks.hook_events import HookResult as HookResult
from sonde.tools.hooks.hook_events import TrainingStopped as TrainingStopped
from sonde.tools.hooks.hook_manager import Hooks as Hooks
