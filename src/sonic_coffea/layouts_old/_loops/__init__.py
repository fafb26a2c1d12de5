"""Compiled loops from awkward's buffers into a request's buffer, and back.

This package is imported only where something is compiled. Kernels return an integer: packing
kernels the first row with a number that cannot be sent, or -1. All of its sources decide what
machine code is kept.
"""
