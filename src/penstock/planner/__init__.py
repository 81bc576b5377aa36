"""Costs of a model under a Plan on a Machine: counts, time and memory, from first principles and without torch."""

from penstock.planner.layouts import Space as Space
from penstock.planner.operators import Software as Software
from penstock.planner.prediction import Prediction as Prediction
from penstock.planner.prediction import predict as predict
from penstock.planner.search import search as search
from penstock.planner.show import prediction_cell as prediction_cell
