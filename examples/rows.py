"""Maps a row of a JSONL file to a problem. Use it with: --arg map=examples/rows.py:to_problem (task "jsonl")."""


def to_problem(row: dict) -> dict:
    return {
        "question": f"{row['story']} {row['query']}\nPut the final answer within \\boxed{{}}.",
        "answer": row["result"],
        "level": row["grade"],  # any other key becomes a field for reward functions and raw prompt templates
    }
