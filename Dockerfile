# The planning service. No torch in it: under 200 MB on top of Python, instead of gigabytes.
#
#   docker build -t autoac .
#   docker run -p 8421:8421 -v autoac:/data -e AUTOAC_TOKEN="$(openssl rand -hex 16)" autoac
#
# A container listens on all of its addresses, so it does not start without AUTOAC_TOKEN, unless its
# database has keys. The database is a file in /data, or what AUTOAC_DATABASE_URL says. The same image is a
# worker: `docker run ... autoac python -m autoac.api worker`.
# tests/api/test_image.py follows the COPY, RUN, ENV, HEALTHCHECK and CMD lines outside of Docker:
# keep RUN lines that install in the form `pip install ...`.
FROM python:3.11-slim

WORKDIR /src
COPY constraints.txt ./
COPY service.pyproject.toml pyproject.toml
COPY planner planner
COPY pages pages
COPY api api
RUN pip install --no-cache-dir -c constraints.txt ".[postgres]"
RUN pip check
RUN useradd --system --no-create-home autoac

RUN mkdir /data && chown autoac /data

WORKDIR /
USER autoac
ENV AUTOAC_HOST=0.0.0.0 AUTOAC_PORT=8421 XDG_DATA_HOME=/data
VOLUME /data
EXPOSE 8421
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"AUTOAC_PORT\"]}/livez', timeout=4)"]
CMD ["python", "-m", "autoac.api"]
