-- What is pushed; stands on `_endings.lua`.
local LONGEST_TIMEOUT = 2 ^ 53

local function is_id(value)
  return type(value) == 'string' and #value <= 128 and string.match(value, '^[A-Za-z0-9_.:-]+$') ~= nil
end

-- The id in bytes that are no request, for the error reply; nil where none can be read.
local function find_id(payload)
  local id = string.match(string.sub(payload, 1, 4096), '"id"%s*:%s*"([^"\\]+)"')
  return is_id(id) and id or nil
end

-- What a push says: its id (or nil), the request, and what is wrong with it (or nil).
local function open(payload, max_payload)
  if #payload > max_payload then return find_id(payload), nil, 'the request is larger than the limit' end
  local ok, said = pcall(cjson.decode, payload)
  if not ok then return find_id(payload), nil, 'the request is not valid JSON' end
  if type(said) ~= 'table' or not is_id(said.id) then return nil, nil, 'the request has no valid id' end
  return said.id, said, nil
end

local function timeout_of(said)
  local timeout = said.timeout_ms
  if type(timeout) == 'number' and timeout >= 1 and timeout < LONGEST_TIMEOUT then return math.floor(timeout) end
end

local function meet_husk(id, until_ms)
  redis.call('HINCRBY', META, 'husks', -1)
  redis.call('HDEL', request_key(id), 'husk')
  redis.call('PEXPIREAT', request_key(id), until_ms)
end

local PUSHED = {
  'state', 'sha1', 'stream', 'deliveries', 'due', 'cost', 'kept_until', 'cancelled', 'enqueued', 'husk', 'reply_to',
}

-- The request of a push that has just left its list: id, fields, and whether they are in its hash already; nothing if the
-- push begins nothing. Of several pushes under one id the first counts, and an accepted enqueue before a bare push with
-- another body.
local function take_push(payload, max_payload, ttl)
  if payload == POKE then return end
  local sha1 = #payload <= max_payload and redis.sha1hex(payload)
  -- Most pushes have their id in front. Those of an accepted enqueue need no decoding, which costs 6 µs a kilobyte.
  local guess = string.match(payload, '^{"id":"([A-Za-z0-9_.:-]+)"')
  local id, known, said, problem = guess, guess and read(guess, unpack(PUSHED)) or {}, nil, nil
  if known.sha1 ~= sha1 then
    id, said, problem = open(payload, max_payload)
    if not id then return rubbish(problem, '', payload) end
    if id ~= guess then known = read(id, unpack(PUSHED)) end
  end
  if known.state == 'waiting' and known.sha1 == sha1 and not known.deliveries then
    dequeue(known)
    if problem then return refuse(id, known, payload, problem, 'invalid_request', ttl) end
    return id, known, true
  end
  if known.husk and known.sha1 == sha1 then return meet_husk(id, known.husk) end
  if known.state then
    if problem then return rubbish(problem, id, payload) end
    return count('duplicates')
  end
  count('enqueued')
  if problem then return refuse(id, {}, payload, problem, 'invalid_request', ttl) end
  local reply_to = is_id(said.reply_to) and said.reply_to or nil
  local request = { sha1 = sha1, stream = said.stream == true and '1' or nil, reply_to = reply_to, cancelled = known.cancelled }
  begin(id, request, timeout_of(said))
  return id, request, false
end
