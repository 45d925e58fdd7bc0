-- empty(limit, ttl, max_payload) -> {taken, ended}
--
-- Ends up to `limit` waiting requests as cancelled, begun before or not. Less taken than `limit`: nothing waits any more.
pass_maxmemory()
local limit, ttl, max_payload = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local taken, ended = 0, 0

local function end_begun(id)
  local request = read_whole(id)
  if request.state ~= 'waiting' or not request.deliveries then return end
  end_early(id, request, 'cancelled', ttl)
  ended = ended + 1
end

local function end_pushed(payload)
  local id, request = take_push(payload, max_payload, ttl)
  if not id then return end
  request.payload = payload
  end_early(id, request, 'cancelled', ttl)
  ended = ended + 1
end

local function drain(list, end_one)
  while taken < limit do
    local item = redis.call('LPOP', list)
    if not item then return end
    taken = taken + 1
    if not pcall(end_one, item) then
      count('script_errors')
      rubbish('the request could not be ended', '', item)
    end
  end
end

for _, list in ipairs({ RESUME, SUSPECTS }) do drain(list, end_begun) end
for _, list in ipairs({ HIGH, REQUESTS, LOW }) do drain(list, end_pushed) end
return { taken, ended }
