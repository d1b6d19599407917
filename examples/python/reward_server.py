"""A reward server: the reward function of reward_func.py over HTTP.

Start: python examples/python/reward_server.py --port 5000
Use:   --remote_rm_url http://<host>:5000/get_reward   (several servers: commas between the URLs)

With OPENRLHF_REWARD_TOKEN set on both sides, only callers with that token are served.
"""

import argparse
import os
import secrets

import uvicorn
from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel, Field
from reward_func import reward_func

app = FastAPI()


class Samples(BaseModel):
    """The body of a request; the lists are equally long."""

    query: list[str] = Field(min_length=1)
    prompts: list[str]
    labels: list


@app.post("/get_reward")
def get_reward(samples: Samples, authorization: str = Header(default="")) -> dict:
    """Scores a batch; each value of the reply is a list with one number per query."""
    token = os.environ.get("OPENRLHF_REWARD_TOKEN")
    if token and not secrets.compare_digest(authorization, f"Bearer {token}"):
        raise HTTPException(401, "wrong or no bearer token")
    if not len(samples.query) == len(samples.prompts) == len(samples.labels):
        raise HTTPException(422, "query, prompts and labels differ in length")
    reply = reward_func(samples.query, samples.prompts, samples.labels)
    return {
        "rewards": reply["rewards"].tolist(),
        "scores": reply["scores"].tolist(),
        "extra_logs": {name: values.tolist() for name, values in reply["extra_logs"].items()},
    }


@app.get("/health")
def health() -> dict:
    """Says that the server is up."""
    return {"status": "ok"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000)
    options = parser.parse_args()
    uvicorn.run(app, host=options.host, port=options.port)
