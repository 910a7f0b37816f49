"""What to do: pure decisions on values. No torch, no event loop, no clock, no threads, no logging."""
