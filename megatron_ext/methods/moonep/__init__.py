"""MoonEP: overloaded ranks fill others completely, till all are even."""
