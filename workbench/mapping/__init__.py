"""Search for the fastest mapping of models to devices: workloads, hardware, cost model, search. Starts no processes."""

from workbench.mapping.costs import Constants as Constants
from workbench.mapping.hardware import Hardware as Hardware
from workbench.mapping.hardware import ProductRates as ProductRates
from workbench.mapping.plan import Plan as Plan
from workbench.mapping.plan import Plans as Plans
from workbench.mapping.predict import predict as predict
from workbench.mapping.search import search as search
from workbench.mapping.simulate import Simulation as Simulation
from workbench.mapping.simulate import simulate as simulate
from workbench.mapping.what_if import what_if as what_if
from workbench.mapping.workload import Call as Call
from workbench.mapping.workload import Workload as Workload
