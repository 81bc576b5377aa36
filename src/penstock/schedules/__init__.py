"""Pipeline schedules as data, free of torch: generate, print and parse, validate, simulate.

A schedule is an order of actions for each rank. Their times follow from their dependencies and costs. A
runtime that executes the same orders gets the same result.
"""

from penstock.schedules.costs import Costs as Costs
from penstock.schedules.generate import SCHEDULE_NAMES as SCHEDULE_NAMES
from penstock.schedules.generate import ScheduleName as ScheduleName
from penstock.schedules.generate import generate as generate
from penstock.schedules.generate import schedule_of as schedule_of
from penstock.schedules.schedule import Action as Action
from penstock.schedules.schedule import Kind as Kind
from penstock.schedules.schedule import Schedule as Schedule
from penstock.schedules.simulate import Shared as Shared
from penstock.schedules.simulate import Simulation as Simulation
from penstock.schedules.simulate import Span as Span
from penstock.schedules.simulate import play_shared as play_shared
from penstock.schedules.simulate import simulate as simulate
from penstock.schedules.simulate import with_communication as with_communication
from penstock.schedules.validate import validate as validate
