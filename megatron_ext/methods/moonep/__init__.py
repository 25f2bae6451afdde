"""MoonEP: overloaded ranks fill others completely, till all are even.

    moonep.py  strategy `moonep`

It solves every load by itself.
"""
