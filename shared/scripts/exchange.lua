-- exchange(worker, slots, ack, lease, ttl, max_payload, finishes, checkpoints,
--          finishes × (id, fence, reason, body, start, count, ids, text),
--          checkpoints × (id, fence, start, count, ids, text))
--   -> {owned, claims, finished, checkpointed}
--
-- One step of one worker: save what was generated, post what is finished, claim what fits into the free slots.
--   owned         id, fence, id, fence, ...: all that the worker owns now; it drops whatever is not among them
--   claims        {id, fence, payload, deliveries, queue_ms, age_ms, ids, text} with a fence above `ack`, the highest that
--                 the worker has received: a repeated call gets the same ones and takes nothing new
--   finished      1 done (now or before), 0 fenced
--   checkpointed  1 stored (now or before), 0 fenced, -1-n "the broker has n tokens, send from there"
pass_maxmemory()
local worker, slots, ack = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local lease, ttl, max_payload = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local finishes, checkpoints = tonumber(ARGV[7]), tonumber(ARGV[8])
local FIRST, FINISH_WIDTH, CHECKPOINT_WIDTH = 9, 8, 6
local own = KEYS[8]

-- Append tokens to the stream of a request if they begin where it ends.
local function append(id, request, start, total, ids, text)
  local known = tonumber(request.tokens or 0)
  -- Without token ids: the text that a worker held back until the end.
  if start + total <= known and (total > 0 or text == '') then return 1 end
  if start ~= known then return -1 - known end
  redis.call('XADD', tokens_key(id), '*', 'start', start, 'ids', ids, 'text', text, 'fence', request.fence)
  redis.call('HSET', request_key(id), 'tokens', start + total)
  return 1
end

local function finish_one(id, fence, reason, body, start, total, ids, text)
  local request = read(id, 'state', 'fence', 'worker', 'sha1', 'stream', 'tokens')
  if request.fence ~= fence then
    count('fenced')
    return 0
  end
  if request.state ~= 'running' then return 1 end
  -- A gap here means that the broker has lost tokens that it once had: the reply, which has all of them, still counts.
  if request.stream then append(id, request, tonumber(start), tonumber(total), ids, text) end
  redis.call('ZREM', LEASES, id)
  redis.call('ZREM', own_key(request.worker), id)
  finish(id, request, reason, body, ttl)
  return 1
end

local function checkpoint_one(id, fence, start, total, ids, text)
  local request = read(id, 'state', 'fence', 'tokens')
  if request.fence ~= fence then
    count('fenced')
    return 0
  end
  if request.state ~= 'running' then return 1 end
  return append(id, request, tonumber(start), tonumber(total), ids, text)
end

-- The output tokens so far: their ids, and their text.
local function saved_output(id)
  local ids, texts = {}, {}
  for _, entry in ipairs(redis.call('XRANGE', tokens_key(id), '-', '+')) do
    local fields = entry[2]
    for i = 1, #fields, 2 do
      if fields[i] == 'ids' then ids[#ids + 1] = fields[i + 1] end
      if fields[i] == 'text' then texts[#texts + 1] = fields[i + 1] end
    end
  end
  return table.concat(ids, ','), table.concat(texts)
end

local function delivery(id)
  local request = read(id, 'fence', 'payload', 'deliveries', 'enqueued', 'claimed', 'tokens')
  assert(request.payload and request.deliveries)
  local ids, text = '', ''
  if request.tokens then ids, text = saved_output(id) end
  local queue_ms, age_ms = request.claimed - request.enqueued, now - request.enqueued
  return { id, request.fence, request.payload, request.deliveries, integer(queue_ms), integer(age_ms), ids, text }
end

local free, fence, claims = 0, 0, {}

-- Add a delivery to the answer; a request that somebody has damaged is ended rather than claimed for ever.
local function answer_with(id)
  local ok, answer = pcall(delivery, id)
  if ok then
    claims[#claims + 1] = answer
    return
  end
  count('script_errors')
  redis.call('ZREM', LEASES, id)
  redis.call('ZREM', own, id)
  refuse(id, '', 'the state of the request is damaged', 'internal', ttl)
end

local function claim(id)
  fence, free = fence + 1, free - 1
  local key = request_key(id)
  redis.call('HSET', key, 'state', 'running', 'fence', integer(fence), 'worker', worker)
  redis.call('HINCRBY', key, 'deliveries', 1)
  redis.call('HSETNX', key, 'claimed', integer(now))
  redis.call('ZADD', LEASES, integer(now + lease), id)
  redis.call('ZADD', own, integer(fence), id)
  answer_with(id)
end

local function claim_resumed(id)
  if read(id, 'state').state == 'waiting' then claim(id) end
end

local function is_id(value)
  return type(value) == 'string' and #value <= 128 and string.match(value, '^[A-Za-z0-9_.:-]+$') ~= nil
end

-- The id in bytes that are no request, for the error reply; nil where none can be read.
local function find_id(payload)
  local id = string.match(string.sub(payload, 1, 4096), '"id"%s*:%s*"([^"\\]+)"')
  return is_id(id) and id or nil
end

-- What a push says: id (or nil), whether it streams, and what is wrong with it (or nil).
local function open(payload)
  if #payload > max_payload then return find_id(payload), false, 'the request is larger than the limit' end
  local ok, request = pcall(cjson.decode, payload)
  if not ok then return find_id(payload), false, 'the request is not valid JSON' end
  if type(request) ~= 'table' or not is_id(request.id) then return nil, false, 'the request has no valid id' end
  return request.id, request.stream == true, nil
end

local function claim_pushed(payload)
  local id, streams, problem = open(payload)
  if not id then return dead_letter(problem, '', payload) end
  local sha1 = redis.sha1hex(payload)
  local known = read(id, 'state', 'sha1')
  if known.state and (known.state ~= 'waiting' or known.sha1 ~= sha1) then
    if problem then return dead_letter(problem, id, payload) end
    return count('duplicates')
  end
  if not known.state then count('enqueued') end
  if problem then return refuse(id, payload, problem, 'invalid_request', ttl) end
  if not known.state then
    redis.call('HSET', request_key(id), 'enqueued', integer(now), 'sha1', sha1)
    if streams then redis.call('HSET', request_key(id), 'stream', '1') end
  end
  redis.call('HSET', request_key(id), 'payload', payload)
  claim(id)
end

-- Take from the head of a list until the slots are full; bounded, however much of it is rubbish.
local function claim_from(list, claim_item)
  for _ = 1, 2 * free + 16 do
    local item = free > 0 and redis.call('LPOP', list)
    if not item then return end
    if not pcall(claim_item, item) then
      count('script_errors')
      dead_letter('the request could not be claimed', '', item)
    end
  end
end

local function claim_new()
  free = slots - redis.call('ZCARD', own)
  if free <= 0 or redis.call('EXISTS', RESUME, REQUESTS) == 0 then return end
  fence = math.max(tonumber(redis.call('HGET', META, 'fence') or 0), now_us)
  redis.call('HSET', META, 'fence', integer(fence + free))
  write_layout()
  claim_from(RESUME, claim_resumed)
  claim_from(REQUESTS, claim_pushed)
end

-- Checkpoints first: of a request that has both in one call, the last tokens follow those of the checkpoint.
local checkpointed = each(FIRST + finishes * FINISH_WIDTH, CHECKPOINT_WIDTH, checkpoints, checkpoint_one)
local finished = each(FIRST, FINISH_WIDTH, finishes, finish_one)

local unseen = redis.call('ZRANGEBYSCORE', own, '(' .. ack, '+inf')
for _, id in ipairs(unseen) do answer_with(id) end
if #unseen == 0 then claim_new() end

local owned = redis.call('ZRANGE', own, 0, -1, 'WITHSCORES')
for i = 2, #owned, 2 do owned[i] = integer(owned[i]) end
return { owned, claims, finished, checkpointed }
