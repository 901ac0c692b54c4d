"""Calibration constants, measured or published."""
