"""The integration suite: Berth's router and agent before a real SGLang, on a CPU."""
