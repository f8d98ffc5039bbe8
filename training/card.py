def model_card(f: str) -> str:
    return f
