"""The same plan and schedule on virtual devices: seconds, idle time and bytes on links before anything runs."""

from coterie.simulator.forecast import Forecast, StageForecast, simulate_plan

__all__ = ["Forecast", "StageForecast", "simulate_plan"]
