"""The real-engine lane: Berth's router and agent before a real SGLang, on a CPU."""
